"""Cost models of a user: plans, proofs and checks follow their prices, and wrong answers are named."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel import TEST_DEVICE, Cost, CostModel, CostModelError, estimate, get_device
from costmodel.model import plain_device, with_cost_model
from fuseplan.extend import SolutionCache, using_cache
from fuseplan.report.text import unfused_plan
from fuseplan.support.errors import ExtensionError, InvalidArgumentError, InvalidPlanError
from tests.helpers import brute_force

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((4096, 1024), "float32")


def softmax(x):
    e = jnp.exp(x - jax.lax.reduce_max(x, (1,))[:, None])
    return e / e.sum(1)[:, None]


class TwiceHbm(CostModel):
    """Bytes of HBM at twice their time."""

    at_least_estimated = True

    def cost(self, graph, kernel, device, estimated):
        return replace(estimated, memory_ps=2 * estimated.memory_ps)


class WithoutLaunches(CostModel):
    """Launches are free; nothing is said of floors."""

    def cost(self, graph, kernel, device, estimated):
        return replace(estimated, launch_ps=0)


@dataclass(frozen=True)
class Fusing(CostModel):
    """A fixed time for each operation of a kernel beyond the first: fusing does not pay, or always does."""

    each_ps: int
    whole_ps: int

    def cost(self, graph, kernel, device, estimated):
        return Cost(launch_ps=self.whole_ps + self.each_ps * (len(kernel.nodes) - 1))


class ByItsFloor(TwiceHbm):
    """As ``TwiceHbm``, with a floor of its own in the place of the promise."""

    at_least_estimated = False

    def floor_ps(self, graph, nodes, device, estimated_ps):
        return estimated_ps


MODELS = {
    "twice": TwiceHbm(),
    "by its floor": ByItsFloor(),
    "no launches": WithoutLaunches(),
    "fusing is free": Fusing(0, 10**6),
    "fusing is dear": Fusing(10**7, 10**6),
}


def plan_by(model, f=softmax, device="h200", **options):
    return fuseplan.make_plan(f, device=device, cost_model=model, **options)(X)


# --- plans and proofs --------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "test"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_proven_and_checked_by_the_prices(name, device):
    plan = plan_by(MODELS[name], device=device)
    assert plan.status == "OPTIMAL"
    assert plan.bound_ps == plan.objective_ps
    assert plan.verify(), plan.verify().reason
    for kernel in plan.kernels:
        own = estimate(plan.graph, kernel.spec, plain_device(plan.device))
        if own == Cost():
            assert kernel.cost == own  # a renaming
        else:
            asked = MODELS[name].cost(plan.graph, kernel.spec, plain_device(plan.device), own)
            assert kernel.cost.time_ps == asked.time_ps
        assert (kernel.cost.hbm_bytes, kernel.cost.flops) == (own.hbm_bytes, own.flops)
    assert plan.notes[0] == f"priced by the cost model {MODELS[name].name}, not by fuseplan's own"


@pytest.mark.parametrize("name", MODELS)
def test_the_solver_finds_the_best_of_all_plans(name, monkeypatch):
    for device, spec in brute_force.DEVICES.items():
        monkeypatch.setitem(brute_force.DEVICES, device, with_cost_model(spec, MODELS[name]))
    found = [brute_force.compare(brute_force.random_case(seed)) for seed in range(100_060, 100_070)]
    assert not [text for comparison in found for text in comparison.wrong]


def test_plans_follow_the_prices():
    plain = fuseplan.make_plan(softmax, device="h200")(X)
    assert len(plain.kernels) == 1
    assert len(plan_by(Fusing(0, 10**6)).kernels) == 1
    dear = plan_by(Fusing(10**7, 10**6))
    assert all(len(kernel.spec.nodes) == 1 for kernel in dear.kernels)
    assert dear.objective_ps == 10**6 * sum(1 for kernel in dear.kernels if kernel.cost.time_ps)
    assert dear.verify()


def test_a_launch_that_costs_nothing_is_saved_by_no_kernel():
    """Two small sums have nothing in common: one kernel of both saves a launch, and nothing else."""

    def sums(x):
        return jnp.sin(x[:8, :8]).sum(), jnp.cos(x[:8, :8] * 3).sum()

    plain = fuseplan.make_plan(sums, device="h200")(X)
    free = fuseplan.make_plan(sums, device="h200", cost_model=WithoutLaunches())(X)
    assert free.status == plain.status == "OPTIMAL"
    assert free.objective_ps < plain.objective_ps
    assert free.verify()


def test_the_explanation_and_the_unfused_plan_have_the_prices():
    plan = plan_by(Fusing(0, 10**6))
    assert plan.explain(0, len(plan.graph.nodes) - 1).extra_ps == 10**6
    working = [node for node in plan.graph.nodes if not node.bitcast]
    assert unfused_plan(plan).objective_ps == 10**6 * len(working)


def test_compare_has_the_prices():
    frame = fuseplan.compare(softmax, device="h200", planners=("unfused", "solver"), cost_model=TwiceHbm())(X)
    plain = fuseplan.compare(softmax, device="h200", planners=("unfused", "solver"))(X)
    assert (frame.time_us > plain.time_us).all()
    assert (frame.hbm_bytes == plain.hbm_bytes).all()


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_jit_runs_what_the_model_decides(device):
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    fast = fuseplan.jit(softmax, device=device, cost_model=Fusing(10**7, 10**6))
    np.testing.assert_allclose(fast(x), softmax(x), rtol=1e-5)
    assert fast.plan(x).device.cost_model == Fusing(10**7, 10**6)


@pytest.mark.slow
def test_attention_in_one_kernel_is_priced_by_the_model():
    shape = jax.ShapeDtypeStruct((1, 1024, 12, 64), "bfloat16")
    attend = jax.nn.dot_product_attention
    one = fuseplan.make_plan(attend, device="h200", cost_model=TwiceHbm())(shape, shape, shape)
    assert one.verify()
    none = fuseplan.make_plan(attend, device="h200", cost_model=Fusing(10**9, 10**6))(shape, shape, shape)
    assert max(len(kernel.spec.nodes) for kernel in none.kernels) == 1
    assert none.verify()


# --- caches -----------------------------------------------------------------------------------


def test_no_solution_is_remembered_across_models():
    with using_cache(SolutionCache()) as cache:
        plain = fuseplan.make_plan(softmax, device="h200")(X)
        size = len(cache)
        dear = plan_by(Fusing(10**7, 10**6))
        free = plan_by(Fusing(0, 10**6))
        assert len(cache) == size
        assert (len(plain.kernels), len(free.kernels)) == (1, 1)
        assert len(dear.kernels) > 1
        assert fuseplan.make_plan(softmax, device="h200")(X).kernels == plain.kernels


def test_a_device_with_a_model_is_another_device():
    plain = get_device("h200")
    one, other = with_cost_model(plain, Fusing(1, 2)), with_cost_model(plain, Fusing(1, 3))
    assert len({plain, one, other, with_cost_model(plain, Fusing(1, 2))}) == 3
    assert plain_device(one) == plain == with_cost_model(one, None)
    assert replace(one, name="else").cost_model == Fusing(1, 2)


# --- files ------------------------------------------------------------------------------------


def test_a_file_names_the_model_and_is_read_with_it():
    plan = plan_by(TwiceHbm())
    text = plan.to_json()
    again = fuseplan.Plan.from_json(text, cost_model=plan.device.cost_model)
    assert again == plan
    assert again.verify()
    with pytest.raises(
        InvalidPlanError, match=r'priced by the cost model "TwiceHbm", and none is given: read it'
    ):
        fuseplan.Plan.from_json(text)
    with pytest.raises(InvalidPlanError, match="and 'WithoutLaunches' is given"):
        fuseplan.Plan.from_json(text, cost_model=WithoutLaunches())
    plain = fuseplan.make_plan(softmax, device="h200")(X).to_json()
    with pytest.raises(InvalidPlanError, match="without cost_model"):
        fuseplan.Plan.from_json(plain, cost_model=TwiceHbm())


def test_a_model_of_the_same_name_with_other_prices_is_refused():
    text = plan_by(Fusing(0, 10**6)).to_json()
    with pytest.raises(InvalidPlanError, match=r"claims 1,000,000 ps .* but costs 7 ps"):
        fuseplan.Plan.from_json(text, cost_model=Fusing(0, 7))


# --- wrong answers ----------------------------------------------------------------------------


def model(cost=None, floor_ps=None):
    """A model called Strange that answers by these functions."""
    own = {}
    if cost is not None:
        own["cost"] = lambda self, graph, kernel, device, estimated: cost(estimated)
    if floor_ps is not None:
        own["floor_ps"] = lambda self, graph, nodes, device, estimated_ps: floor_ps(estimated_ps)
    return type("Strange", (TwiceHbm,), own)()


def test_a_bound_above_the_cost_names_the_group():
    with pytest.raises(
        ExtensionError, match=r"floor_ps of the cost model 'Strange' is no lower bound: n\d+ "
    ) as e:
        plan_by(model(floor_ps=lambda estimated_ps: 3 * estimated_ps + 10**9))
    assert "ps by its cost, and at least" in str(e.value)
    assert "0 always holds" in str(e.value)


@pytest.mark.parametrize("device", ["h200", "cpu"])
@pytest.mark.parametrize(
    ("cost", "told"),
    [
        (lambda estimated: None, "for n.* should be a Cost, got None"),
        (
            lambda estimated: replace(estimated, memory_ps=-1),
            "memory_ps of cost of the cost model 'Strange' for n",
        ),
        (lambda estimated: replace(estimated, memory_ps=1.5), r"should be whole picoseconds.*got 1.5"),
        (lambda estimated: replace(estimated, vector_ps=float("nan")), "vector_ps .*got nan"),
        (
            lambda estimated: replace(estimated, memory_ps=10**30),
            r"above the longest time of a kernel.*is it in picoseconds\?",
        ),
        (lambda estimated: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_cost_that_is_none_names_the_model_and_the_group(device, cost, told):
    with pytest.raises(ExtensionError, match=told) as caught:
        plan_by(model(cost=cost), device=device)
    assert "'Strange'" in str(caught.value)


@pytest.mark.parametrize(
    ("floor_ps", "told"),
    [
        (lambda estimated_ps: -1, "should be whole picoseconds"),
        (lambda estimated_ps: None, "got None"),
        (lambda estimated_ps: 10**30, r"above the longest time of .* kernels.*is it in picoseconds\?"),
        (lambda estimated_ps: [][0], "raised IndexError"),
    ],
)
def test_a_floor_that_is_none_names_the_model(floor_ps, told):
    with pytest.raises(ExtensionError, match=told):
        plan_by(model(floor_ps=floor_ps))


def test_a_price_below_the_promise_names_the_group():
    with pytest.raises(
        ExtensionError, match=r"for n\d+ .*though at_least_estimated is true: set it to False"
    ):
        plan_by(model(cost=lambda estimated: replace(estimated, launch_ps=0)))


def test_a_model_with_no_price_is_no_plan_of_another_planner():
    with pytest.raises(ExtensionError, match="cost model 'Strange'"):
        plan_by(model(cost=lambda estimated: None), planner="greedy")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "expected a cost model, an object with name, cost, floor_ps .*got 3"),
        (TwiceHbm, "expected a cost model"),
        (lambda *_: 0, "expected a cost model"),
    ],
)
def test_what_is_no_model(given, told):
    with pytest.raises(InvalidArgumentError, match=told):
        fuseplan.make_plan(softmax, device="h200", cost_model=given)
    with pytest.raises(CostModelError, match=told):
        with_cost_model(TEST_DEVICE, given)


@pytest.mark.parametrize("planner", ["solver", "greedy"])
def test_the_longest_time_is_planned_and_proven(planner):
    """No warning of the solver: sums of such times fit in 64 bits."""
    longest = 2**50
    plan = plan_by(Fusing(0, longest), planner=planner)
    assert plan.verify()
    with pytest.raises(ExtensionError, match="above the longest time"):
        plan_by(Fusing(0, longest + 1), planner=planner)


def test_a_name_or_a_hash_that_raises():
    class Nameless(TwiceHbm):
        @property
        def name(self):
            raise RuntimeError("no name today")

    class Hashless(TwiceHbm):
        def __hash__(self):
            raise RuntimeError("no hash today")

    for given, told in (
        (Nameless(), "that of a Nameless raised RuntimeError: no name today"),
        (Hashless(), "the hash of the cost model 'Hashless' raised RuntimeError: no hash today"),
    ):
        with pytest.raises(InvalidArgumentError, match=told):
            fuseplan.make_plan(softmax, device="h200", cost_model=given)


def test_a_model_that_cannot_be_hashed():
    @dataclass
    class Changing(TwiceHbm):
        factor: int = 2

    with pytest.raises(InvalidArgumentError, match=r"'Changing' cannot be hashed.*frozen=True"):
        fuseplan.jit(softmax, device="h200", cost_model=Changing())


def test_any_object_with_the_members_is_a_model():
    class Plain:
        name = "plain"
        at_least_estimated = True

        def cost(self, graph, kernel, device, estimated):
            return estimated

        def floor_ps(self, graph, nodes, device, estimated_ps):
            return estimated_ps

    plan = plan_by(Plain())
    own = fuseplan.make_plan(softmax, device="h200")(X)
    assert [kernel.spec for kernel in plan.kernels] == [kernel.spec for kernel in own.kernels]
    assert plan.objective_ps == own.objective_ps
