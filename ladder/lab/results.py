"""Recorded results: every published number is a row in a JSON file that says where, when and how it was measured."""

import datetime
import functools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

SCHEMA = 1
FOLDER = Path(os.environ.get("LADDER_RESULTS") or Path(__file__).resolve().parents[2] / "notebooks" / "results")


class NotRecorded(LookupError):
    """A row or a file of results that is not there; the message says in a sentence which, and how it is recorded."""




def machine(device="cpu"):
    """What ran: GPU or CPU name, driver, and the versions that decide about speed."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        gpu, driver = torch.cuda.get_device_name(device), _driver()
    else:
        gpu, driver = None, None
    return {
        "gpu": gpu,
        "driver": driver,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
    }


def document(rows, *, device="cpu", limits=None, command=None, **extra):
    """A results document of schema 1 around ``rows``, stamped with this machine, the commit and the command."""
    result = {
        "schema": SCHEMA,
        "recorded": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command or _command(),
        "machine": machine(device),
        "limits": limits.as_dict() if hasattr(limits, "as_dict") else limits,
        **extra,
        "rows": list(rows),
    }
    validate(result)
    return {**result, "rows": typed(rows)}


def row(case, impl, *, timing=None, flops=None, num_bytes=None, peak_bytes=None, parity=None, **extra):
    """One result: a case, an implementation and what was measured. Absent measurements stay absent."""
    result = {"case": case, "impl": impl}
    if timing is not None:
        result["ms"] = timing.as_dict()
        if flops:
            result["tflops"] = round(flops / timing.median / 1e9, 4)
        if num_bytes:
            result["tbs"] = round(num_bytes / timing.median / 1e9, 5)
    if peak_bytes is not None:
        result["peak_bytes"] = int(peak_bytes)
    if parity is not None:
        result["max_error"] = parity.max_error if math.isfinite(parity.max_error) else None
        result["budget"] = parity.budget
        result["ok"] = bool(parity.ok)
        if parity.reason:
            result["reason"] = parity.reason
    return Row({**result, **extra})


class Row(dict):
    """A recorded result, with its usual fields as attributes; what was not measured is None.

    case, impl, ms (median milliseconds), tflops, tbs, peak_bytes,
    bytes_moved, ok, max_error, budget. Anything else: by its key.
    """

    def _of(name):
        return property(lambda self: self.get(name))

    case, impl, ok, tflops, tbs = _of("case"), _of("impl"), _of("ok"), _of("tflops"), _of("tbs")
    peak_bytes, bytes_moved, max_error, budget = _of("peak_bytes"), _of("bytes_moved"), _of("max_error"), _of("budget")
    del _of

    @property
    def ms(self):
        """Median milliseconds of a call."""
        return self["ms"]["median"] if "ms" in self else None

    @property
    def mode(self):
        """What kind of case this is: "prefill", "decode", ..."""
        return self["case"].get("mode")

    @property
    def is_rung(self):
        """Whether a rung was measured, and not a peer."""
        return self["impl"].startswith("step")


def typed(rows):
    """Rows as ``Row`` objects; those that are already stay themselves."""
    return [entry if isinstance(entry, Row) else Row(entry) for entry in rows]


def timed(rows, *modes):
    """The rows that hold a time, of some modes or of all; candidates of a sweep are left out."""
    return [r for r in typed(rows) if "ms" in r and (not modes or r.mode in modes) and not r.impl.startswith("sweep")]


def by(rows, key):
    """[{implementation: Row}] of rows, a dict for each value of ``key(row)``, in the order of the rows."""
    found = {}
    for entry in typed(rows):
        found.setdefault(key(entry), {})[entry.impl] = entry
    return list(found.values())


def case_key(case):
    """A case as something that can be a key."""
    return tuple(sorted((k, str(v)) for k, v in case.items()))


def by_case(rows):
    """``by`` case: what was measured of the same problem stands together."""
    return by(rows, lambda row: case_key(row.case))


def validate(doc):
    """Raise ValueError naming the field that does not fit schema 1."""
    if not isinstance(doc, dict):
        raise ValueError(f"results: a document is an object, not {type(doc).__name__}")
    for field in ("schema", "recorded", "commit", "command", "machine", "limits", "rows"):
        if field not in doc:
            raise ValueError(f"results: field {field!r} is missing")
    if doc["schema"] != SCHEMA:
        raise ValueError(f"results: schema is {doc['schema']!r}; want {SCHEMA}")
    for field, kind in (("machine", dict), ("rows", list)):
        if not isinstance(doc[field], kind):
            raise ValueError(f"results: {field} is {doc[field]!r}; want {'an object' if kind is dict else 'a list'}")
    for number, entry in enumerate(doc["rows"]):
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("case"), dict)
            or not isinstance(entry.get("impl"), str)
        ):
            raise ValueError(f"results: row {number} is {entry!r}; want a 'case' object and an 'impl' name")
        if "ms" in entry and (not isinstance(entry["ms"], dict) or set(entry["ms"]) != {"median", "p20", "p80"}):
            raise ValueError(f"results: row {number} has ms {entry['ms']!r}; want median, p20 and p80")


def write(doc, target):
    """Write a document to a file, whole or not at all; "-" is standard output."""
    validate(doc)
    head = {k: v for k, v in doc.items() if k != "rows"}
    lines = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in doc["rows"])  # a row a line: readable diffs
    text = json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "rows": [\n  ' + lines + "\n ]\n}\n"
    if str(target) == "-":
        sys.stdout.write(text)
    else:
        write_text(target, text)


class CannotWrite(ValueError):
    """A file could not be written; the message names it and what stood there before still does."""


def write_text(path, text):
    """Write a text file, whole or not at all; CannotWrite names the file."""
    _write_whole(path, lambda file: file.write(text.encode()))


def write_figure(path, figure, **options):
    """Save a matplotlib figure in the format of the file's name, whole or not at all; CannotWrite names the file."""
    _write_whole(path, lambda file: figure.savefig(file, format=Path(path).suffix[1:] or "png", **options))


def _write_whole(path, fill):
    """Have ``fill`` write to a file beside ``path``, which then takes its place."""
    path = Path(path)
    try:
        if path.exists() and (not path.is_file() or str(path.parent) in ("/dev", "/dev/fd")):
            with open(path, "ab") as file:  # a device or a pipe is written to, never replaced
                fill(file)
            return
        real = Path(os.path.realpath(path))  # a link stays a link
        partial = real.with_name(real.name + ".partial")
        try:
            with open(partial, "wb") as file:
                fill(file)
            os.replace(partial, real)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror or error}") from error


def names_what_it_cannot_write(main):
    """A command whose ``main`` is decorated ends with exit code 2 and one sentence when a file cannot be written."""

    @functools.wraps(main)
    def guarded(*args, **options):
        try:
            return main(*args, **options)
        except CannotWrite as error:
            print(error, file=sys.stderr)
            return 2

    return guarded


def load(name):
    """Read a document by its name in ``notebooks/results`` or by its path, and validate it."""
    path = Path(name) if str(name).endswith(".json") else FOLDER / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json"))) or "none"
        hint = (
            "" if FOLDER.exists() else "; they come with a checkout of the repository, not with the installed package"
        )
        raise FileNotFoundError(f"no recorded results at {path}; recorded so far: {known}{hint}")
    return read(path)


def read(path):
    """Read and validate the document in a file; ValueError names the file that holds none."""
    try:
        doc = json.loads(Path(path).read_text())
        validate(doc)
    except (ValueError, UnicodeDecodeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).removeprefix("results: ")
        raise ValueError(f"results: {path} holds no results document: {reason}") from error
    return {**doc, "rows": typed(doc["rows"])}


def kept_rows(path, rows, machine, *, by_impl=False):
    """Rows of an earlier file on the same machine and versions for cases that ``rows`` does not measure again, each
    with its own commit, date, command and limits; none where there is no file. by_impl: also those of a case that it
    measures with other implementations.

    A row that says it is partial does not replace a whole one: it is taken out of ``rows``.

    Raises:
        ValueError: the file holds no results, or those of another GPU, torch or Triton.
    """
    if not Path(path).is_file():
        return []
    old = read(path)
    same = ("gpu", "torch", "triton")
    if any(old["machine"].get(k) != machine.get(k) for k in same):
        raise ValueError(
            f"{path} was recorded on {[old['machine'].get(k) for k in same]}, this is "
            f"{[machine.get(k) for k in same]}; want the same"
        )

    def name(entry, impl=True):
        return repr(sorted(entry["case"].items(), key=str)), entry["impl"] if impl else None

    whole = {name(e) for e in old["rows"] if not e.get("partial")}
    better = {name(e) for e in rows if e.get("partial")} & whole
    rows[:] = [e for e in rows if not e.get("partial") or name(e) not in whole]
    now = {name(e, by_impl) for e in rows}
    stamp = {k: old[k] for k in ("commit", "recorded", "command")}
    # a row kept before has its own, or nobody knows them any more
    limits = {"limits": old["limits"]} if old["limits"] else {}
    return [
        {**stamp, **({} if "recorded" in e else limits), **e} for e in old["rows"]
        if name(e, by_impl) not in now or name(e) in better and not e.get("partial")
    ]  # fmt: skip


def kept_note(path):
    """{"note": what an earlier file says of itself}, for the document that keeps its rows; {} where there is none."""
    return {"note": note} if Path(path).is_file() and (note := read(path).get("note")) else {}


def still_not_run(path, left, measured):
    """Names of what a document that keeps the rows of an earlier file lacks: what this run has ``left``, and what the
    earlier one had, less what is ``measured`` now; only the former where there is no file."""
    earlier = read(path).get("not_run", []) if Path(path).is_file() else []
    measured = set(measured)
    return list(dict.fromkeys([*left, *(name for name in earlier if name not in measured)]))


def origin(doc, row):
    """{"recorded", "commit", "command"} of a row: its own, those that
    the document has for its part, or the document's."""
    earlier = doc.get("earlier", {}).get(row["case"].get("part"), {})  # of several GPUs, where parts are kept, not rows
    own = {k: row.get(k) or earlier.get(k) for k in ("recorded", "commit", "command")}
    if own["recorded"] or own["commit"]:  # a part that was kept without its command does not come from the document's
        return own
    return {k: doc[k] for k in own}


def sources(doc, rows):
    """Commits and commands that ``rows`` of a document come from, as a caption says it: kept rows have their own."""
    found = dict.fromkeys((o["commit"], o["command"]) for o in (origin(doc, row) for row in rows))
    return "; ".join(_commit_name(commit) + (f", by `{command}`" if command else "") for commit, command in found)


def _commit_name(commit):
    return f"commit {commit[:12]}{'+' * commit.endswith('+')}" if commit else "no commit"


def limit(doc, row, name):
    """A limit of the run that measured ``row``; of the document's run where a kept row does not say."""
    return (row.get("limits") or doc["limits"])[name]


def limits_note(doc, rows):
    """A sentence for a caption about whose limits shares of ``rows`` refer to; empty where one run measured all."""
    earlier = [row for row in rows if origin(doc, row)["recorded"] != doc["recorded"]]
    known = [row for row in earlier if row.get("limits")]
    if not earlier:
        return ""
    whose = "the limits of their own run" if known else "the limits of the newest run"
    return f" Shares of rows of earlier runs are of {whose}" + (
        " where it recorded them, else of the newest run's." if known and len(known) < len(earlier) else "."
    )


def select(doc, impl=None, **case):
    """Rows whose implementation and case fields equal the given ones."""
    rows = [r for r in typed(doc["rows"]) if impl is None or r.impl == impl]
    return [r for r in rows if all(r.case.get(k) == v for k, v in case.items())]


def one(doc, impl, **case):
    """The single row that matches. NotRecorded: there is none. LookupError: there are several."""
    found = select(doc, impl, **case)
    if len(found) > 1:
        raise LookupError(f"{len(found)} rows of {impl} match {case}; want one")
    return wanted(found, doc, f"{impl} with {', '.join(f'{name} {value}' for name, value in case.items())}")[0]


def wanted(found, doc, what):
    """``found``, which is not empty and not None; else NotRecorded says that ``what`` is missing in ``doc``."""
    if not found:
        raise NotRecorded(f"Not recorded: {what}. `{doc['command']}` records it.")
    return found


def caption(doc, rows=None):
    """Where numbers come from, for a caption: "recorded on NVIDIA H200, 2026-11-29"; of ``rows``, kept ones among them,
    the first and the last day where they differ."""
    days = sorted({origin(doc, row)["recorded"][:10] for row in rows or () if origin(doc, row)["recorded"]}) or [
        doc["recorded"][:10]
    ]
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"recorded on {doc['machine']['gpu'] or doc['machine']['cpu']}, {when}"


def commit():
    """The commit of this source tree, with "+" when files differ from it; None outside a git checkout."""
    if os.environ.get("LADDER_COMMIT"):  # a copy of the tree without its .git says what it was copied from
        return os.environ["LADDER_COMMIT"]
    root = Path(__file__).resolve().parents[2]
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root, *args):
    # without optional locks a question writes no index, which a full disk would leave locked
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", root, *args], capture_output=True, text=True, check=True
    ).stdout.strip()


def _command():
    """The command line of this process, as a reader would type it."""
    program = Path(sys.argv[0])
    packages = [folder for folder in program.parents if (folder / "__init__.py").exists()]
    if not packages and program.name == "__main__.py":
        packages = [program.parent]
    if not packages:
        return shlex.join(["python", program.name, *sys.argv[1:]])
    module = program.with_suffix("").relative_to(packages[-1].parent).parts
    name = ".".join(module[:-1] if module[-1] == "__main__" else module)
    return shlex.join(["python", "-m", name, *sys.argv[1:]])


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver():
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
