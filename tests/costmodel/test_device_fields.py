"""Every field of a ``DeviceSpec`` has a range, and every value outside it is an error that says so."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import jax
import numpy as np
import pytest

import fuseplan
from costmodel import DEVICES, TEST_DEVICE, DeviceSpec, InvalidDeviceError, estimate
from costmodel.calibrate import described_cpu
from costmodel.device_fields import FIELDS, Flag, Pairs, Text, Whole
from fuseplan.support.errors import InvalidPlanError

NAMES = [field.name for field in dataclasses.fields(DeviceSpec)]

NO_INTEGERS = [None, "4800", "", 1.5, 1e12, math.nan, math.inf, -math.inf, True, False, np.True_,
               np.float32(2.0), np.float64("nan"), np.arange(2), 1j, [1], (1,)]  # fmt: skip


def bad_values(field: str) -> list[object]:
    """Values that no device has in a field, by what is declared of the field."""
    kind = FIELDS[field]
    if isinstance(kind, Whole):
        below = [-1, -kind.low, np.int64(-1), kind.low - 1]
        below += [1, kind.low - 1] if kind.or_none else [] if kind.low == 0 else [0, np.uint8(0)]
        below = [n for n in below if n < kind.low and not (kind.or_none and n == 0)]
        return [*NO_INTEGERS, *below, kind.high + 1, 10**400]
    if isinstance(kind, Text):
        return [None, "", 3, 1.0, True, b"gpu", ("gpu",), *(["GPU", "cuda"] if kind.choices else [])]
    if isinstance(kind, Flag):
        return [None, 0, 1, "yes", 1.0, math.nan]
    assert isinstance(kind, Pairs)
    inner = [-1, 0, 1, 1.5, math.nan, True, "1"] if isinstance(kind.item, Whole) else [None, "", 3, math.nan]
    good = getattr(TEST_DEVICE, field)[0][1]
    wrong = [None, 3, "text", [("float32", good)], {"float32": good}, (("float32", good, 1),), ((3, good),)]
    wrong += [(["float32", good],), (("", good),), (("float32", good), ("float32", good)), ("ab",)]
    return [*wrong, *([()] if kind.least else []), *((("float32", item),) for item in inner)]


def test_every_field_has_a_range_and_every_range_a_field() -> None:
    assert list(FIELDS) == NAMES
    assert all(kind.remedy and kind.accepted for kind in FIELDS.values())


def test_a_field_without_a_range_is_an_error() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Wider(DeviceSpec):
        colour: int = 3

    with pytest.raises(KeyError, match="colour"):
        Wider(**{name: getattr(TEST_DEVICE, name) for name in NAMES})


@pytest.mark.parametrize("field", NAMES)
def test_a_value_outside_of_the_range_is_named_with_range_and_remedy(field: str) -> None:
    values = {name: getattr(TEST_DEVICE, name) for name in NAMES}
    kind = FIELDS[field]
    assert len(bad_values(field)) >= 6
    for value in bad_values(field):
        for make in (
            lambda v: DeviceSpec(**{**values, field: v}),
            lambda v: dataclasses.replace(TEST_DEVICE, **{field: v}),
        ):
            with pytest.raises(InvalidDeviceError) as caught:
                make(value)
            text = str(caught.value)
            assert isinstance(caught.value, ValueError)
            assert text.startswith(f"DeviceSpec.{field}"), text
            assert caught.value.field.startswith(field)
            assert "expected" in text
            assert "got" in text
            assert kind.remedy in text or getattr(kind, "item", kind).remedy in text or "leave one" in text
            if isinstance(kind, Whole):
                assert f"{kind.low:,} to {kind.high:,} {kind.unit}" in text


@pytest.mark.parametrize("field", [name for name in NAMES if isinstance(FIELDS[name], Whole)])
def test_the_ends_of_the_range_and_numpy_s_integers_are_accepted(field: str) -> None:
    kind = FIELDS[field]
    for value in (kind.low, kind.high, np.int64(kind.low), *([0] if kind.or_none else [])):
        without_caches = {"cache_bytes": 0, "private_cache_bytes": 0}
        device = dataclasses.replace(described_cpu(), **{**without_caches, field: value})
        assert type(getattr(device, field)) is int
        assert getattr(device, field) == value


def test_numpy_s_scalars_make_the_same_device_and_the_same_json() -> None:
    numpy = dataclasses.replace(
        TEST_DEVICE,
        name=np.str_("test"),
        core_count=np.int32(TEST_DEVICE.core_count),
        sequential_grid=np.bool_(False),
        matrix_flops_per_s=tuple((name, np.int64(rate)) for name, rate in TEST_DEVICE.matrix_flops_per_s),
    )
    assert numpy == TEST_DEVICE
    assert hash(numpy) == hash(TEST_DEVICE)
    assert json.dumps(dataclasses.asdict(numpy)) == json.dumps(dataclasses.asdict(TEST_DEVICE))
    assert type(numpy.name) is str
    assert type(numpy.sequential_grid) is bool


@pytest.mark.parametrize(
    ("size", "rate"),
    [("cache_bytes", "cache_bytes_per_s"), ("private_cache_bytes", "private_cache_bytes_per_s")],
)
def test_a_cache_with_bytes_has_a_rate(size: str, rate: str) -> None:
    with pytest.raises(
        InvalidDeviceError, match=f"DeviceSpec.{rate}: expected a rate above 0 beside {size}=1,024"
    ):
        dataclasses.replace(described_cpu(), **{size: 1024, rate: 0})
    assert dataclasses.replace(described_cpu(), **{size: 0, rate: 0})


def test_a_known_device_can_be_copied_and_pickled() -> None:
    for device in DEVICES.values():
        assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    error = pickle.loads(pickle.dumps(InvalidDeviceError("core_count", "expected more")))
    assert (str(error), error.field) == ("DeviceSpec.core_count: expected more", "core_count")


def softmax(x):
    return jax.nn.softmax(x) @ x.T


@pytest.mark.parametrize("field", [name for name in NAMES if isinstance(FIELDS[name], (Whole, Pairs))])
def test_the_slowest_and_the_least_device_is_planned_without_a_division_by_zero(field: str) -> None:
    """The ends of each range give finite prices that the solver can hold."""
    kind = FIELDS[field]
    if isinstance(kind, Whole):
        ends = [kind.low, kind.high, *([0] if kind.or_none else [])]
    elif isinstance(kind.item, Whole):
        ends = [(("float32", kind.item.low),), (("int8", kind.item.high),)]
    else:
        ends = [()]
    x = jax.ShapeDtypeStruct((512, 512), "float32")
    for base in (TEST_DEVICE, described_cpu()):
        for end in ends:
            if field.endswith("cache_bytes_per_s") and end == 0:
                continue  # refused beside a cache that has bytes
            if field.endswith("cache_bytes") and not getattr(base, f"{field}_per_s"):
                continue
            device = dataclasses.replace(base, **{field: end})
            plan = fuseplan.make_plan(softmax, device=device, deadline_s=5)(x)
            assert plan.objective_ps >= 0
            assert plan.status == "OPTIMAL", (field, end, plan.notes)
            assert all(estimate(plan.graph, k.spec, device) == k.cost for k in plan.kernels)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("core_count", 0, r"plan.device.core_count: expected an integer from 1 to 10,000,000 cores, got 0"),
        ("hbm_bytes_per_s", -1, r"plan.device.hbm_bytes_per_s: expected an integer from 1,000,000"),
        ("matrix_flops_per_s", [["float32", 0]], r"plan.device.matrix_flops_per_s\['float32'\]: expected"),
        ("platform", "abacus", r"plan.device.platform: expected one of 'gpu', 'tpu', 'cpu', got 'abacus'"),
        ("hbm_bytes_per_s", 1.5, r"plan.device.hbm_bytes_per_s: expected an integer, got 1.5"),
    ],
)
def test_a_plan_read_from_a_file_names_the_field(field: str, value: object, message: str) -> None:
    plan = fuseplan.make_plan(softmax, device="test", planner="greedy")(
        jax.ShapeDtypeStruct((64, 64), "float32")
    )
    document = json.loads(plan.to_json())
    document["plan"]["device"][field] = value
    with pytest.raises(InvalidPlanError, match=message):
        fuseplan.Plan.from_json(json.dumps(document))
