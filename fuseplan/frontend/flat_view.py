"""A jaxpr as one list of equations in which patterns are looked for, and the jaxpr made of it anew.

Calls are seen through, as ``fuseplan.frontend.trace`` does, but they are remembered (``Call``): a jaxpr that
is made anew keeps every call that nothing was replaced in, with its derivative and batching rules.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.trace import INLINED, Equation, Literal, Operand, inlinable
from fuseplan.support import jax_compat

TRANSPARENT_CALLS = ("jit", "closed_call")
"""Calls without a rule of their own: to inline them changes no derivative."""

DERIVATIVE_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
"""Calls with a derivative of their own."""

_NOT_EVALUATED = (*DERIVATIVE_CALLS, "scan", "while", "cond")

_JAX_FILES = f" at {os.path.dirname(jax.__file__)}{os.sep}"


@dataclass(eq=False)
class Call:
    """A call that is seen through; the outermost stands for the whole program."""

    eqn: Any
    """The equation of the call; None for the program."""
    parent: Call | None
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    items: list[int | Call] = field(default_factory=list)
    """The positions of the equations in ``FlatView.equations``, and the calls, in order."""

    @property
    def has_rules(self) -> bool:
        """Whether the call has a derivative or a batching rule of its own, or says what is recomputed."""
        return self.eqn is not None and self.eqn.primitive.name not in TRANSPARENT_CALLS

    @property
    def has_own_derivative(self) -> bool:
        """Whether the call has a derivative that its operations do not have. The ``custom_jvp`` of JAX's own
        functions are another way to write theirs."""
        if self.eqn is None or self.eqn.primitive.name not in DERIVATIVE_CALLS:
            return False
        body, rule = (self.eqn.params.get(k) for k in ("call_jaxpr", "jvp_jaxpr_fun"))
        sources = [
            getattr(getattr(f, "debug_info", None), "func_src_info", None)
            for f in (getattr(body, "jaxpr", body), rule)
        ]
        return not all(_JAX_FILES in (source or "") for source in sources)

    @property
    def around(self) -> list[Call]:
        """This call and those that it is in, without the program; innermost first."""
        return [] if self.parent is None else [self, *self.parent.around]

    def within(self) -> Iterable[int]:
        """The positions of all equations in it."""
        for item in self.items:
            if isinstance(item, Call):
                yield from item.within()
            else:
                yield item

    def calls(self) -> Iterable[Call]:
        """All calls in it, outer ones first."""
        for item in self.items:
            if isinstance(item, Call):
                yield item
                yield from item.calls()


class FlatView:
    """The equations of a closed jaxpr over numbered values, with calls seen through."""

    def __init__(self, closed: jex_core.ClosedJaxpr) -> None:
        self.closed = closed
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.call_of: list[Call] = []
        """The innermost call around each equation."""
        self.raw: list[Any] = []
        """The jaxpr's own equation of each."""
        self.consts: dict[int, Any] = {}
        """The values of constants, by number."""
        self._const: dict[int, int] = {}
        self.inputs = tuple([self._new(v.aval) for v in closed.jaxpr.invars])
        self.program = Call(None, None, self.inputs)
        self.outputs = self._run(closed.jaxpr, closed.consts, self.inputs, self.program, (), ())
        self.producer: dict[int, tuple[int, int]] = {
            v: (n, k) for n, eqn in enumerate(self.equations) for k, v in enumerate(eqn.outputs)
        }
        self.numbers = self._numbered()
        """For each value a number, equal for equal expressions."""
        self.needed = self.live()
        """The positions of the equations that a result or a side effect needs."""

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, value: Any, aval: Any) -> int:
        if id(value) not in self._const:
            self._const[id(value)] = self._new(aval)
            self.consts[self._const[id(value)]] = value
        return self._const[id(value)]

    def _run(
        self,
        jaxpr: jex_core.Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Operand],
        call: Call,
        callers: tuple[Any, ...],
        within: tuple[str, ...],
    ) -> tuple[Operand, ...]:
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._constant(value, var.aval)
        for eqn in jaxpr.eqns:
            operands = tuple([v if isinstance(v, Literal) else env[v] for v in eqn.invars])
            inner = inlinable(eqn)
            if inner is not None and eqn.primitive.name in DERIVATIVE_CALLS and _passes_on(inner[0]):
                inner = None
            frames = (eqn.source_info, *callers)
            scope = within + jax_compat.scope_names(eqn.source_info)
            results: Sequence[Operand]
            if inner is None:
                made_here = tuple([self._new(v.aval) for v in eqn.outvars])
                results = made_here
                call.items.append(len(self.equations))
                self.call_of.append(call)
                self.raw.append(eqn)
                in_avals, out_avals = (tuple([v.aval for v in own]) for own in (eqn.invars, eqn.outvars))
                self.equations.append(
                    Equation(eqn.primitive, eqn.params, operands, made_here, in_avals, out_avals,
                             bool(eqn.effects), frames, eqn.ctx, scope)
                )  # fmt: skip
            else:
                made = Call(eqn, call, operands)
                call.items.append(made)
                results = made.outputs = self._run(*inner, operands, made, frames, scope)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple([v if isinstance(v, Literal) else env[v] for v in jaxpr.outvars])

    def _numbered(self) -> list[int]:
        describe, known = Describer(), dict[Any, int]()
        numbers = list(range(len(self.avals)))
        # Equal values with other derivatives are not one value.
        calls = [self.program, *self.program.calls()]
        rule = {c: next((k for k in c.around if k.has_own_derivative), None) for c in calls}
        for eqn, call in zip(self.equations, self.call_of, strict=True):
            if eqn.effects or eqn.is_set_apart or eqn.primitive.name in DERIVATIVE_CALLS:
                continue
            operands = tuple([
                (describe.literal(v.val), str(v.aval)) if isinstance(v, Literal) else numbers[v]
                for v in eqn.inputs
            ])  # fmt: skip
            params = describe.params(eqn.primitive.name, eqn.params)
            for k, v in enumerate(eqn.outputs):
                numbers[v] = known.setdefault((rule[call], eqn.primitive.name, params.items, operands, k), v)
        return numbers

    def live(self, replaced: Mapping[int, Sequence[int]] | None = None) -> frozenset[int]:
        """The positions of the equations that a result or a side effect needs, where each value of
        ``replaced`` is computed from other values instead."""
        return self._kept(replaced or {})[0]

    def are_read(self, insertions: Sequence[Insertion]) -> list[bool]:
        """For each of ``insertions``, whether one of its results is needed where all of them are made."""
        _, values = self._kept({v: i.reads for i in insertions for v in i.results})
        return [not values.isdisjoint(i.results) for i in insertions]

    def _kept(self, replaced: Mapping[int, Sequence[int]]) -> tuple[frozenset[int], set[int]]:
        """The positions of the equations that are needed, as in ``live``, and the values."""
        needed: set[int] = set()
        stack = [v for v in self.outputs if not isinstance(v, Literal)]
        kept: set[int] = set()
        for n, eqn in enumerate(self.equations):
            if eqn.effects:
                kept.add(n)
                stack += [v for v in eqn.inputs if not isinstance(v, Literal)]
        while stack:
            v = stack.pop()
            if v in needed:
                continue
            needed.add(v)
            if v in replaced:
                stack += replaced[v]
            elif v in self.producer:
                n = self.producer[v][0]
                if n not in kept:
                    kept.add(n)
                    stack += [u for u in self.equations[n].inputs if not isinstance(u, Literal)]
        return frozenset(kept), needed

    def reaches(self, sources: Iterable[int], targets: Iterable[int]) -> bool:
        """Whether one of the values ``targets`` is computed from one of ``sources``."""
        found, aims = set(sources), set(targets)
        for eqn in self.equations:
            if any(v in found for v in eqn.inputs if not isinstance(v, Literal)):
                found.update(eqn.outputs)
        return not found.isdisjoint(aims)

    def value_of(self, v: Operand, most_elements: int) -> np.ndarray | None:
        """The value of an operand that is computed from constants alone, without loops and from arrays of at
        most this many elements; None of others."""
        values: dict[int, Any] = {}
        wanted: set[int] = set()
        stack = [] if isinstance(v, Literal) else [v]
        while stack:
            u = stack.pop()
            if u in self.consts:
                values[u] = self.consts[u]
                if isinstance(values[u], jax.core.Tracer) or not getattr(
                    values[u], "is_fully_addressable", True
                ):
                    return None
            elif u not in self.producer:
                return None
            elif self.producer[u][0] not in wanted:
                eqn = self.equations[self.producer[u][0]]
                is_large = any(math.prod(getattr(a, "shape", ())) > most_elements for a in eqn.out_avals)
                if eqn.effects or eqn.is_set_apart or is_large or eqn.primitive.name in _NOT_EVALUATED:
                    return None
                wanted.add(self.producer[u][0])
                stack += [w for w in eqn.inputs if not isinstance(w, Literal)]
        with jax.ensure_compile_time_eval():
            for n in sorted(wanted):
                eqn = self.equations[n]
                operands = [w.val if isinstance(w, Literal) else values[w] for w in eqn.inputs]
                made = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
                results = made if eqn.primitive.multiple_results else [made]
                values.update(zip(eqn.outputs, results, strict=True))
            return np.asarray(v.val if isinstance(v, Literal) else values[v])

    def depends_on_itself(self, insertions: Sequence[Insertion], new: Insertion) -> bool:
        """Whether ``new`` would read a value that is computed from a result of its own, with all of
        ``insertions``, ``new`` among them, made. A call that is kept waits for all of its operands."""
        owner = {v: i for i in insertions for v in i.results}
        opened = opened_calls(self, insertions)

        def reads(n: int) -> Iterable[Operand]:
            kept = [call for call in self.call_of[n].around if call not in opened]
            return kept[-1].inputs if kept else self.equations[n].inputs

        with_effects = [n for n, eqn in enumerate(self.equations) if eqn.effects]
        stack: list[Operand] = list(new.reads)
        seen: set[int] = set()
        while stack:
            v = stack.pop()
            if isinstance(v, Literal) or v in seen:
                continue
            seen.add(v)
            if v in owner:
                stack += owner[v].reads
            elif v in self.producer:
                n = self.producer[v][0]
                stack += reads(n)
                if self.equations[n].effects:  # They keep their order.
                    stack += [u for m in with_effects if m < n for u in reads(m)]
        return not seen.isdisjoint(new.results)

    def source_info(self, n: int) -> Any:
        """JAX's ``source_info`` of an equation, as if the calls around it were inlined."""
        source = self.raw[n].source_info
        for outer in self.call_of[n].around:
            source = jax_compat.inlined_source(source, outer.eqn.source_info)
        return source

    def type_of(self, v: Operand) -> Any:
        """The aval of an operand."""
        return v.aval if isinstance(v, Literal) else self.avals[v]


def _passes_on(jaxpr: jex_core.Jaxpr) -> bool:
    """Whether a result of a function is an argument, a constant, or another result: what reads it could not
    be told from what reads that, and would lose the function's derivative."""

    def results(jaxpr: jex_core.Jaxpr) -> list[Any]:
        known: dict[Any, Any] = {}
        for eqn in jaxpr.eqns:
            inner = inlinable(eqn)
            if inner is not None:
                given = dict(zip(inner[0].invars, eqn.invars, strict=True))
                for var, v in zip(eqn.outvars, results(inner[0]), strict=True):
                    passed = v if isinstance(v, Literal) else given.get(v)
                    if passed is not None:
                        known[var] = passed if isinstance(passed, Literal) else known.get(passed, passed)
        return [v if isinstance(v, Literal) else known.get(v, v) for v in jaxpr.outvars]

    found = results(jaxpr)
    outer = {*jaxpr.invars, *jaxpr.constvars}
    return any(isinstance(v, Literal) or v in outer for v in found) or len(set(found)) < len(found)


ClosedJaxpr = jex_core.ClosedJaxpr

Atom = Any
"""A variable or a literal of a jaxpr."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """Values of a flat view that are computed by other equations."""

    results: tuple[int, ...]
    reads: tuple[int, ...]
    make: Callable[[Callable[[Operand], Atom], Sequence[Atom]], list[Any]] = lambda atom, results: []
    """From a function that gives an operand's atom, and the variables of the results, to equations. The
    default is for an insertion that is examined, and not made."""


def rebuilt(
    view: FlatView,
    insertions: Sequence[Insertion],
    bodies: Mapping[int, Mapping[str, Any]],
    of_calls: Mapping[Call, Mapping[str, Any]],
) -> jex_core.ClosedJaxpr:
    """The jaxpr with insertions, with other parameters of the equations at ``bodies`` and of the calls
    ``of_calls``. Calls in which something else changes are inlined; all others are kept."""
    return _Builder(view, insertions, bodies, of_calls).build()


class _Builder:
    def __init__(
        self,
        view: FlatView,
        insertions: Sequence[Insertion],
        bodies: Mapping[int, Mapping[str, Any]],
        of_calls: Mapping[Call, Mapping[str, Any]],
    ) -> None:
        self.view, self.insertions, self.bodies, self.of_calls = view, insertions, bodies, of_calls
        self.replaced = {v for i in insertions for v in i.results}
        self.opened = opened_calls(view, insertions)
        for n in bodies:
            self.opened.update(view.call_of[n].around)
        for call in of_calls:
            self.opened.update(call.around[1:])
        self.atoms: dict[int, Atom] = dict(zip(view.inputs, view.closed.jaxpr.invars, strict=True))
        self.constants: dict[int, Any] = {}
        self.eqns: list[Any] = []

    def atom(self, v: Operand) -> Atom:
        """The variable of a value, or a literal."""
        if isinstance(v, Literal):
            return v
        if v not in self.atoms:
            self.atoms[v] = jex_core.Var(self.view.avals[v])
            if v in self.view.consts:
                self.constants[v] = self.view.consts[v]
        return self.atoms[v]

    def build(self) -> jex_core.ClosedJaxpr:
        view = self.view
        for insertion in self.insertions:
            self.eqns += insertion.make(self.atom, [self.atom(v) for v in insertion.results])
        self._add(view.program)
        outputs = [self.atom(v) for v in view.outputs]
        eqns = _ordered(_needed(self.eqns, outputs))
        jaxpr = view.closed.jaxpr.replace(
            constvars=[self.atoms[v] for v in self.constants], eqns=eqns, outvars=outputs
        )
        return jex_core.ClosedJaxpr(jaxpr, list(self.constants.values()))

    def _add(self, call: Call) -> None:
        for item in call.items:
            if isinstance(item, int):
                eqn = self.view.equations[item]
                self._put(call, self.view.raw[item], eqn.inputs, eqn.outputs, self.bodies.get(item))
            elif item in self.opened:
                self._add(item)
            else:
                self._put(call, item.eqn, item.inputs, item.outputs, self.of_calls.get(item))

    def _put(
        self,
        call: Call,
        raw: Any,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        params: Mapping[str, Any] | None,
    ) -> None:
        """Add an equation. A result that is computed elsewhere, is given twice, or is a literal or an
        operand, has a variable that nothing reads."""
        made: set[int] = set(self.view.inputs) | self.view.consts.keys() | self.replaced
        made.update(v for v in inputs if not isinstance(v, Literal))
        outvars = []
        for var, v in zip(raw.outvars, outputs, strict=True):
            if isinstance(v, Literal) or v in made:
                outvars.append(jex_core.Var(var.aval))
            else:
                made.add(v)
                outvars.append(self.atom(v))
        source = raw.source_info
        for outer in call.around:
            source = jax_compat.inlined_source(source, outer.eqn.source_info)
        new = raw.replace(invars=[self.atom(v) for v in inputs], outvars=outvars, source_info=source)
        self.eqns.append(new if params is None else new.replace(params={**raw.params, **params}))


def function_of(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of flat arrays, evaluated by JAX's own operations."""
    return jex_core.jaxpr_as_fun(closed)


def spliced(
    closed: ClosedJaxpr, operands: Sequence[Atom], results: Sequence[Atom], source_info: Any
) -> list[Any]:
    """The equations of a closed jaxpr without constants, of these operands, that define ``results``."""
    assert not closed.consts, "its constants are in inner jaxprs"
    variables = dict(zip(closed.jaxpr.invars, operands, strict=True))
    outvars = dict(zip(closed.jaxpr.outvars, results, strict=True))
    eqns = []
    for eqn in closed.jaxpr.eqns:
        for v in eqn.outvars:
            variables[v] = outvars[v] if v in outvars else jex_core.Var(v.aval)
        invars = [v if isinstance(v, Literal) else variables[v] for v in eqn.invars]
        eqns.append(
            eqn.replace(invars=invars, outvars=[variables[v] for v in eqn.outvars], source_info=source_info)
        )
    return eqns


def opened_calls(view: FlatView, insertions: Sequence[Insertion]) -> set[Call]:
    """The calls that have to be inlined for these insertions: those in which a result is computed, or a
    value that is read and that they do not return."""
    opened: set[Call] = set()
    for insertion in insertions:
        for v in insertion.results:
            opened.update(view.call_of[view.producer[v][0]].around)
        for v in insertion.reads:
            if v in view.producer:
                opened.update(_hiding(view.call_of[view.producer[v][0]], v))
    return opened


def _hiding(call: Call, v: int) -> list[Call]:
    """The calls around a value that do not return it, and those inside of them."""
    around = call.around
    hiding = [k for k, c in enumerate(around) if v not in c.outputs]
    return around[: hiding[-1] + 1] if hiding else []


def _needed(eqns: Sequence[Any], outputs: Sequence[Atom]) -> list[Any]:
    """The equations without dead ones. They may stand in any order."""
    producer = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    kept = {k for k, eqn in enumerate(eqns) if eqn.effects}
    stack = [v for k in kept for v in eqns[k].invars] + list(outputs)
    while stack:
        v = stack.pop()
        k = None if isinstance(v, Literal) else producer.get(v)
        if k is not None and k not in kept:
            kept.add(k)
            stack += eqns[k].invars
    return [eqn for k, eqn in enumerate(eqns) if k in kept]


def _ordered(eqns: Sequence[Any]) -> list[Any]:
    """The equations with every operand before its readers, otherwise in the order that they have; those with
    effects keep their order among each other."""
    producer = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    waits: list[set[int]] = []
    last: int | None = None
    for k, eqn in enumerate(eqns):
        before = {producer[v] for v in eqn.invars if not isinstance(v, Literal) and v in producer}
        if eqn.effects:
            before |= set() if last is None else {last}
            last = k
        waits.append(before)
    readers: dict[int, list[int]] = {}
    for k, before in enumerate(waits):
        for j in before:
            readers.setdefault(j, []).append(k)
    ready = [k for k, before in enumerate(waits) if not before]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        k = heapq.heappop(ready)
        order.append(k)
        for reader in readers.get(k, ()):
            waits[reader].discard(k)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    assert len(order) == len(eqns), "no equation waits for itself"
    return [eqns[k] for k in order]


def body_key(call_or_eqn: Any) -> str:
    """The parameter of a call's equation that holds its body."""
    return INLINED[call_or_eqn.primitive.name]


def as_param(old: Any, new: jex_core.ClosedJaxpr) -> Any | None:
    """``new`` as a parameter in the place of ``old``: open where that is open; None if it then lacks the
    values of constants."""
    if isinstance(old, jex_core.ClosedJaxpr):
        return new
    return None if new.consts else new.jaxpr


def closed_body(call: Call) -> jex_core.ClosedJaxpr:
    """The body of a call as a closed jaxpr."""
    return jax_compat.closed(call.eqn.params[body_key(call.eqn)])
