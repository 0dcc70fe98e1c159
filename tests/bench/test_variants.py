"""The variants of the Hopper kernel: each adds one idea, and the last that ships is the kernel that ships."""

import pytest

from ladder.bench.variants import CASES, STEPS, configs
from ladder.lab.problem import AttentionProblem
from ladder.step08_dflash2.hopper.prefill import plan_prefill


@pytest.mark.parametrize("name", CASES)
def test_the_ideas_that_ship_add_up_to_the_kernel(name):
    p = AttentionProblem(**CASES[name], dtype="bfloat16")
    found = configs(p)
    assert found[0][0] == "hopper_base" and len({variant for variant, _, _ in found}) == len(found)
    _, config, _ = [entry for entry in found if entry[2]][-1]
    right = 0 if p.causal else None
    arguments = (p.B, p.Hq, p.Hq // p.Hkv, p.Sq, p.Sk, p.D, p.Dv, right, False, False, None, 132, 1)
    assert plan_prefill(*arguments, False, tuple(sorted(config.items()))) == plan_prefill(*arguments)


@pytest.mark.parametrize("name", CASES)
def test_a_variant_differs_from_the_one_it_builds_on(name):
    p = AttentionProblem(**CASES[name], dtype="bfloat16")
    right, before = 0 if p.causal else None, None
    for variant, config, ships in configs(p):
        plan = plan_prefill(p.B, p.Hq, p.Hq // p.Hkv, p.Sq, p.Sk, p.D, p.Dv, right, False, False, None, 132, 1, False, tuple(sorted(config.items())))
        assert plan != before, f"{variant} launches what the variant before it does"
        before = plan if ships else before


def test_every_idea_says_why():
    assert all(why for *_, why in STEPS) and len({name for name, *_ in STEPS}) == len(STEPS)
