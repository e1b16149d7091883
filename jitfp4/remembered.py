"""What a call of a public function did, and how it is done again with other tensors."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from jitfp4.addresses import ALIGNMENT, Places
from jitfp4.dispatch import current_stream, empty_cuda, exchange_device
from jitfp4.layouts import round_up

MOST = 1024  # most sets of addresses that a call remembers: each has argument memory of its own

_APART = 512  # bytes: torch's allocations begin at multiples of it
_address = torch.Tensor.data_ptr
REFUSED = object()
"""What a Repeat returns where it launched nothing."""
Repeat = Callable[[tuple[torch.Tensor, ...]], Any]
"""Repeats a call with other tensors; REFUSED, without a launch, where a condition does not hold."""


class Run(Protocol):
    """A launch with all its arguments: driver.BoundLaunch."""

    def __call__(self) -> int:
        """Launch. Returns the driver's error, 0 for none."""
        ...

    def retry(self, error: int) -> None:
        """Launch after an error, or raise LaunchError."""
        ...


class Launch(Protocol):
    """A launch that can be repeated: driver.PreparedLaunch."""

    def bound(self, addresses: Sequence[int], stream: int) -> Run:
        """The launch on a stream with tensors at these addresses."""
        ...


Pair = tuple[torch.Tensor, torch.Tensor]


class Step(NamedTuple):
    """A launch of a call and its tensors; those of the call that must be aligned, and the pairs that must not share
    memory. They may be tensors of other launches of the call too.
    """

    launch: Launch
    tensors: Sequence[torch.Tensor]
    aligned: tuple[torch.Tensor, ...]
    disjoint: tuple[Pair, ...]


class Temporary(NamedTuple):
    """A tensor that a call made for its launches, the function that made it, and the tensors that it was made from."""

    tensor: torch.Tensor
    make: Callable[..., torch.Tensor]
    sources: tuple[torch.Tensor, ...]


class Companion(NamedTuple):
    """A tensor that belongs to the address of another, ``source``, and the function that finds it."""

    tensor: torch.Tensor
    find: Callable[[torch.Tensor], torch.Tensor]
    source: torch.Tensor


class Notes(NamedTuple):
    """What a running call does: launches in order, None for one that cannot be repeated; and tensors for them."""

    steps: list[Step | None]
    scratch: list[torch.Tensor]
    temporaries: list[Temporary]
    companions: list[Companion]
    parts: list[tuple[torch.Tensor, torch.Tensor]]  # views, and of which tensor
    conditions: list[tuple[Callable[..., bool], tuple[torch.Tensor, ...]]]

    @staticmethod
    def none() -> Notes:
        return Notes([], [], [], [], [], [])


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""A tensor that a call allocates: shape, stride, dtype."""


class Call(NamedTuple):
    """A remembered call. Tensors have numbers: first the arguments, then what is allocated, then the temporaries."""

    launches: tuple[tuple[Launch, slice], ...]  # in order, each with its part of the addresses
    device: int
    chosen: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]  # the launches' tensors
    offsets: tuple[int, ...]  # of the launches' addresses from those of ``chosen``, in bytes; empty if all are 0
    conditions: tuple[tuple[Callable[..., bool], tuple[int, ...]], ...]  # and the numbers of arguments
    allocated: tuple[_Layout, ...]  # results and scratch
    temporaries: tuple[tuple[Callable[..., torch.Tensor], tuple[int, ...]], ...]  # and the numbers of their sources
    aligned: tuple[int, ...]
    disjoint: tuple[tuple[int, int, Places], ...]  # two of the launches' tensors
    companions: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor], int], ...]  # of which of those, by what number
    results: Callable[[Sequence[torch.Tensor]], Any]
    allowed: dict[tuple[int, ...], tuple[Run, ...]]
    """By a stream and addresses of ``chosen`` that passed the checks before: the launches with them."""

    def repeat(self) -> Repeat:
        """The function that repeats the call."""
        # its variables are faster than fields
        _, device, chosen, _, conditions, allocated, temporaries, _, _, _, results, allowed = self

        def repeat(tensors: tuple[torch.Tensor, ...]) -> Any:
            for holds, sources in conditions:
                if not holds(*[tensors[source] for source in sources]):
                    return REFUSED
            previous = exchange_device(device)
            try:
                if allocated:
                    tensors = (*tensors, *[empty_cuda(*layout) for layout in allocated])
                for make, sources in temporaries:
                    tensors = (*tensors, make(*[tensors[source] for source in sources]))
                where = (current_stream(device), *map(_address, chosen(tensors)))
                if (runs := allowed.get(where)) is not None:
                    for run in runs:
                        if error := run():
                            run.retry(error)
                elif not self._launch_new(where, tensors):
                    return REFUSED
            finally:
                if previous != device:
                    exchange_device(previous)
            return results(tensors)

        return repeat

    def _launch_new(self, where: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> bool:
        """Launch with a stream and addresses that are not known yet; returns False, without a launch, where they are
        not allowed.
        """
        stream, *addresses = where
        final = [*map(operator.add, addresses, self.offsets)] if self.offsets else addresses
        if not self._allows(final):
            return False
        lasting, held = True, []
        for place, find, source in self.companions:
            held.append(find(tensors[source]))
            final[place] = held[-1].data_ptr()
            lasting &= find(tensors[source]) is held[-1]
        runs = (*[launch.bound(final[part], stream) for launch, part in self.launches],)
        if lasting:
            if len(self.allowed) >= MOST:
                self.allowed.clear()
            self.allowed[where] = runs
        for run in runs:
            if error := run():
                run.retry(error)
        return True

    def _allows(self, addresses: Sequence[int]) -> bool:
        """Whether the addresses are aligned, and the tensors share no memory, where the operations require it."""
        return not any(addresses[number] % ALIGNMENT for number in self.aligned) and not any(
            places.meet(addresses[first], addresses[second]) for first, second, places in self.disjoint
        )


# ---- what a call did -------------------------------------------------------------------------------------------------


class _Unrepeatable(Exception):  # noqa: N818 - it is no error
    """A call uses a tensor that a repeated call would not find or make."""


def understand(notes: Notes, given: Sequence[torch.Tensor], result: Any) -> tuple[Repeat | None, bool]:
    """How to repeat a call; None if it cannot be repeated, and then whether that holds for all calls like it."""
    steps = [step for step in notes.steps if step is not None]
    if not steps or len(steps) < len(notes.steps):
        return None, bool(notes.steps)
    try:
        return _repeatable(steps, notes, given, result).repeat(), True
    except _Unrepeatable:
        return None, True


def _repeatable(steps: Sequence[Step], notes: Notes, given: Sequence[torch.Tensor], result: Any) -> Call:
    """The call of these launches."""
    launched = [tensor for step in steps for tensor in step.tensors]
    ends = itertools.pairwise([0, *itertools.accumulate(len(step.tensors) for step in steps)])
    returned = () if result is None else result if isinstance(result, tuple) else (result,)
    numbers = _Numbers(given)
    conditions = [(holds, (*map(numbers.of, sources),)) for holds, sources in notes.conditions]
    made = [*(one.tensor for one in notes.temporaries), *(one.tensor for one in notes.companions)]
    results = [one for one in returned if not any(one is other for other in (*given, *notes.scratch, *made))]
    sources = {one.data_ptr() for made_from in notes.temporaries for one in made_from.sources}
    sources |= {one.source.data_ptr() for one in notes.companions}
    allocated = [*results, *(tensor for tensor in notes.scratch if tensor.data_ptr() in sources)]
    for tensor in allocated:
        numbers.add(tensor)
    together = numbers.add_together([tensor for tensor in notes.scratch if tensor.data_ptr() not in sources])
    for tensor in made:
        numbers.add(tensor)
    for view, source in notes.parts:
        numbers.add_part(view, source)
    chosen, offsets = zip(*map(numbers.at, launched), strict=True)
    owners = {numbers.of(one.tensor): (one.find, numbers.source(one.source)) for one in notes.companions}
    companions = tuple((place, *owners[number]) for place, number in enumerate(chosen) if number in owners)
    for tensor in results:
        if not _is_whole(tensor) or numbers.of(tensor) not in chosen:  # part of another, or not filled by a launch
            raise _Unrepeatable
    places = {tensor.data_ptr(): place for place, tensor in enumerate(launched)}
    return Call(
        tuple((step.launch, slice(*part)) for step, part in zip(steps, ends, strict=True)),
        launched[0].get_device(),
        take([owners[number][1] if number in owners else number for number in chosen]),
        offsets if any(offsets) else (),
        (*conditions, *numbers.twins),
        (*((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in allocated), *together),
        tuple((one.make, tuple(map(numbers.source, one.sources))) for one in notes.temporaries),
        tuple(places[a] for step in steps for tensor in step.aligned if (a := tensor.data_ptr()) in places),
        tuple(
            (places[a], places[b], Places.of(first, second))
            for step in steps
            for first, second in step.disjoint
            if (a := first.data_ptr()) in places and (b := second.data_ptr()) in places
        ),
        companions,
        _results_of(result, [*map(numbers.of, returned)]),
        {},
    )


def _results_of(result: Any, places: Sequence[int]) -> Callable[[Sequence[torch.Tensor]], Any]:
    if result is None:
        return _none
    return take(places) if isinstance(result, tuple) else operator.itemgetter(*places)


def _none(_tensors: Sequence[torch.Tensor]) -> None:
    return None


def _at_one_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


class _Numbers:
    """The numbers of a call's tensors, by object and by address."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self._known: list[torch.Tensor | None] = list(given)  # None for what holds several
        self._places: dict[int, tuple[int, int]] = {}  # by address: a number, and the offset from that tensor
        self.twins: list[tuple[Callable[[torch.Tensor, torch.Tensor], bool], tuple[int, int]]] = []
        for number, tensor in enumerate(given):
            if tensor.numel():
                first, _ = self._places.setdefault(tensor.data_ptr(), (number, 0))
                if first != number:
                    # It is not known which of them the kernel got: they must be equal again. What a function does may
                    # also depend on whether it was given one tensor twice.
                    one = self._known[first] is tensor
                    self.twins.append((operator.is_ if one else _at_one_place, (first, number)))

    def add(self, tensor: Any) -> None:
        """Give a tensor the next number. Raises _Unrepeatable when another one begins at its address."""
        if not isinstance(tensor, torch.Tensor):
            raise _Unrepeatable
        number, offset = self._places.setdefault(tensor.data_ptr(), (len(self._known), 0))
        self._known.append(tensor)
        if offset or self._known[number] is not tensor:
            raise _Unrepeatable

    def add_together(self, tensors: Sequence[torch.Tensor]) -> tuple[_Layout, ...]:
        """Give the next number to one allocation that holds these tensors, in order. Returns its layout, if any."""
        if not tensors:
            return ()
        number, size = len(self._known), 0
        self._known.append(None)
        for tensor in tensors:
            if self._places.setdefault(tensor.data_ptr(), (number, size)) != (number, size):
                raise _Unrepeatable
            size += round_up(tensor.nbytes, _APART)
        return (((size,), (1,), torch.uint8),)

    def add_part(self, view: torch.Tensor, source: torch.Tensor) -> None:
        """Let the address of a view stand for an offset from the tensor of which it is a view."""
        number, offset = self.of(source), view.data_ptr() - source.data_ptr()
        if self._places.setdefault(view.data_ptr(), (number, offset)) != (number, offset):
            raise _Unrepeatable  # it is not known which of the two the kernel got

    def of(self, tensor: torch.Tensor) -> int:
        """The number of this object."""
        for number, known in enumerate(self._known):
            if known is tensor:
                return number
        raise _Unrepeatable

    def source(self, tensor: torch.Tensor) -> int:
        """The number of this object, or of the tensor of which it is a view."""
        known = any(one is tensor for one in self._known)
        if known:
            return self.of(tensor)
        number, offset = self.at(tensor)
        if offset:
            raise _Unrepeatable
        return number

    def at(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The number of the tensor that begins where this one does, or in which it begins, and the offset."""
        if tensor.data_ptr() not in self._places:
            raise _Unrepeatable
        return self._places[tensor.data_ptr()]


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers the whole of its storage."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def take(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the items with these numbers, as a tuple."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    if not numbers:
        return _nothing
    (number,) = numbers
    return lambda values: (values[number],)


def _nothing(_values: Sequence[Any]) -> tuple[Any, ...]:
    return ()
