"""Chapter 10 and what it stands on: explorers, exercises, the recorded results, and the committed notebook itself."""

import json
import re

import numpy as np
import pytest

from dspark_mini import Placement, bundled_trace, gpu_tokens, place, split_batch
from ladder.chapters.ch10_scheduling import exercises

ipywidgets = pytest.importorskip("ipywidgets")
from support import ROOT

from ladder.chapters.ch10_scheduling import widgets

NOTEBOOK = ROOT / "notebooks" / "10_scheduling.ipynb"
RECORD = ROOT / "notebooks" / "results" / "dspark.json"

# Targets that the recorded run does not reach, with the value that is shown instead. Nothing else may be missed.
KNOWN_MISSES = {
    ("mixed", "step / lower bound"),  # the bound is not tight where prefixes and KV caches compete for workers
    ("R1-like (generated), every expert's load times exp(0.5 N)", "moved copies per layer, max"),  # the median is met
}


def test_the_stepper_shows_what_split_batch_does():
    trace = bundled_trace()
    plan = place(trace.counts(0, 768), num_gpus=8, num_slots=72)
    for layer, counts in enumerate(trace.counts(800, 864)[:6]):
        states = widgets.pour_trace(counts, plan, layer)
        peaks = [max(state[3]) for state in states]
        assert peaks == sorted(peaks, reverse=True)  # no step makes the busiest GPU busier
        assert states[-1][3] == gpu_tokens(split_batch(counts, plan, layer), plan).tolist()
        for _, _, table, totals in states:
            assert [sum(row.get(g, 0) for row in table) for g in range(8)] == totals
            assert [sum(row.values()) for row in table] == counts.tolist()


def test_explorers_answer_their_controls():
    puzzle = widgets.Puzzle()
    before = puzzle.picture.value
    puzzle.show_solution()
    assert puzzle.picture.value != before and puzzle.placement.digest() == puzzle.best.digest()
    assert f"{puzzle.best.balancedness[0]:.3f}" in puzzle.readout.value
    for slot in puzzle.slots:
        slot.value = 0
    assert "nowhere" in puzzle.readout.value and puzzle.placement is None

    plan = Placement([[0, 1, 0, 2]], [4.0, 1.0, 1.0], 2)
    stepper = widgets.PourStepper([9, 5, 1], plan)
    stepper.step.value = stepper.step.max
    assert "busiest GPU 8 tokens, bound 8" in stepper.readout.value

    explorer = widgets.SimulationExplorer()
    even = explorer.run()["neither"].balancedness
    explorer.skew.value = 1.6
    assert explorer.run()["neither"].balancedness < even
    explorer.gpus.value, explorer.per_node.value = 16, 2  # eight small nodes: the network between them counts
    assert "throughput" in explorer.readout.value

    for widget in (puzzle, stepper, explorer):
        data, _ = widget._repr_mimebundle_()
        assert data["image/png"][:4] == b"\x89PNG" and "0x" not in data["text/plain"]


@pytest.mark.parametrize("name", exercises.EXERCISES)
def test_exercises(name, capsys):
    exercise = exercises.EXERCISES[name]
    assert exercises.run(name, "visible", exercise.solve) is None
    assert exercises.run(name, "strict", exercise.solve) is None
    assert exercises.run(name, "visible", lambda *_: None) is not None  # the stub
    assert exercises.run(name, "visible", lambda *_: 1 / 0) == "it raised ZeroDivisionError: division by zero"
    exercises.check(name, exercise.solve)
    exercises.hint(name, 3)
    exercises.solution(name)
    assert f"{name} strict: pass" in capsys.readouterr().out


def test_strict_exercise_tests_catch_plausible_mistakes():
    def last_tie(load, num_slots):
        copies = np.ones(len(load), int)
        for _ in range(num_slots - len(load)):
            ratio = load / copies
            copies[len(load) - 1 - np.argmax(ratio[::-1])] += 1
        return copies

    def level_everybody(tokens, levels):
        return (tokens + levels.sum()) / len(levels) - levels

    def longest_first(costs):
        t = np.zeros(len(costs[0]))
        for row in sorted(costs, key=lambda row: -min(row)):
            w = int(np.argmin(t + row))
            t[w] += row[w]
        return t.max()

    for name, wrong in (("10a", last_tie), ("10b", level_everybody), ("10c", longest_first)):
        assert exercises.run(name, "visible", wrong) is None
        assert exercises.run(name, "strict", wrong) is not None


def test_the_record_holds_every_target():
    record = json.loads(RECORD.read_text())
    assert record["schema"] == 1 and record["commit"] and record["machine"]["cpu"]
    judged = [row for row in record["rows"] if row["ok"] is not None]
    assert {row["target_no"] for row in judged} == set(range(1, 9))
    for row in judged:
        relation, number = row["target"].split()
        met = row["value"] >= float(number) - 1e-9 if relation == ">=" else row["value"] <= float(number) + 1e-9
        assert met == row["ok"], row
        if not row["ok"]:
            named = row["case"].get("traffic") or row["case"].get("shift")
            assert (named, row["metric"]) in KNOWN_MISSES, row
    baselines = {row["impl"] for row in record["rows"]}
    assert {"round_robin", "least_loaded", "replicate_and_pack", "equal_split", "LP", "HiGHS"} <= baselines


def cells():
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_was_executed_in_order_without_errors():
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
    assert "widgets" not in json.loads(NOTEBOOK.read_text())["metadata"]


def test_the_notebook_quotes_the_record():
    """Recorded numbers that the notebook prints are the ones in the file."""
    rows = json.loads(RECORD.read_text())["rows"]
    text = "".join(
        "".join(output.get("text", [])) for cell in cells() if cell["cell_type"] == "code" for output in cell["outputs"]
    )
    for load, gpus in (("Zipf 1.2", 64), ("Zipf 0.8", 64), ("Zipf 1.2", 144)):
        wanted = [
            f"{row['value']:.3f}"
            for impl in ("replicate_and_pack", "place", "bound")
            for row in rows
            if row["impl"] == impl
            and row["metric"] == "balancedness, median"
            and (row["case"].get("load"), row["case"].get("gpus")) == (load, gpus)
        ]
        assert re.search(rf"{re.escape(load)} +{gpus} +\d+ +" + " +".join(map(re.escape, wanted)), text)
    for row in rows:
        if row["metric"] == "step / lower bound" and row["impl"] == "plan_batch":
            assert f"{row['value']:.3f}" in text
