"""Sets of CPU numbers as values: ``CoreSet.parse("0-13,28")``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpulaunch.errors import ConfigError

LARGEST_CPU = (1 << 20) - 1
"""The largest number in a set.  The limit keeps a mistyped number from becoming a huge set; Linux supports at
most 8192 CPUs."""


class CoreSet:
    """An immutable, sorted set of the operating system's CPU numbers, NUMA node numbers or ranks.

    ``str()`` returns the list in the notation of ``taskset -c``, cpusets and sysfs, such as ``0-13,28``.
    ``CoreSet.parse(str(cores)) == cores``.  ``a <= b`` means that ``b`` contains all of ``a``.
    """

    __slots__ = ("_bits",)
    _bits: int

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        bits = 0
        for number in numbers:
            if not 0 <= number <= LARGEST_CPU:
                raise ValueError(f"not a CPU number: {number}")
            bits |= 1 << number
        self._bits = bits

    @classmethod
    def parse(cls, text: str) -> CoreSet:
        """Parse numbers and ranges separated by commas; ``0-6:2`` is 0, 2, 4, 6.

        Raises `ConfigError`, whose ``part`` is the invalid piece.
        """
        bits = 0
        for part in text.split(",") if text.strip() else ():
            first, last, step = _parse_part(part.strip(), text.strip())
            if step == 1:
                bits |= (1 << (last + 1)) - (1 << first)
            else:
                for number in range(first, last + 1, step):
                    bits |= 1 << number
        return cls._of(bits)

    @classmethod
    def _of(cls, bits: int) -> CoreSet:
        cores = cls.__new__(cls)
        cores._bits = bits
        return cores

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first number and length of each run of consecutive numbers."""
        bits, start = self._bits, 0
        while bits:
            gap = _trailing_zeros(bits)
            length = _trailing_zeros(~(bits >> gap))
            yield start + gap, length
            start += gap + length
            bits >>= gap + length

    def __str__(self) -> str:
        return ",".join(
            str(first) if length == 1 else f"{first}-{first + length - 1}" for first, length in self.ranges()
        )

    def __repr__(self) -> str:
        return f"CoreSet({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        bits = self._bits
        while bits:
            yield _trailing_zeros(bits)
            bits &= bits - 1

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __bool__(self) -> bool:
        return self._bits != 0

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number >= 0 and bool(self._bits >> number & 1)

    def __eq__(self, other: object) -> bool:
        return self._bits == other._bits if isinstance(other, CoreSet) else NotImplemented

    def __hash__(self) -> int:
        return hash((CoreSet, self._bits))

    def __or__(self, other: CoreSet) -> CoreSet:
        return CoreSet._of(self._bits | other._bits)

    def __and__(self, other: CoreSet) -> CoreSet:
        return CoreSet._of(self._bits & other._bits)

    def __sub__(self, other: CoreSet) -> CoreSet:
        return CoreSet._of(self._bits & ~other._bits)

    def __le__(self, other: CoreSet) -> bool:
        return not self._bits & ~other._bits

    def mask(self) -> str:
        """Return the set as a hexadecimal mask without ``0x``, as ``taskset -p`` prints it."""
        return format(self._bits, "x")


def _parse_part(part: str, text: str) -> tuple[int, int, int]:
    """Return first, last and step of one piece such as ``3``, ``0-13`` or ``0-12:2``."""
    bounds, colon, step = part.partition(":")
    first, dash, last = bounds.partition("-")
    numbers = [first, last if dash else first, step if colon else "1"]
    if (colon and not dash) or not all(n.isascii() and n.isdigit() for n in numbers):
        raise _bad_part(part, text, "is neither a number nor a range")
    low, high, stride = (int(n.lstrip("0")[:9] or "0") for n in numbers)
    if high > LARGEST_CPU or low > LARGEST_CPU:
        raise _bad_part(part, text, f"exceeds {LARGEST_CPU}, the largest possible number")
    if high < low:
        raise _bad_part(part, text, "ends before it starts")
    if stride == 0:
        raise _bad_part(part, text, "has a step of 0")
    return low, high, stride


def _bad_part(part: str, text: str, what: str) -> ConfigError:
    where = "" if part == text else f" in the list {text!r}"
    return ConfigError(f"{part!r}{where} {what}", hint="A list of numbers looks like 0-13,28.", part=part)


def _trailing_zeros(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
