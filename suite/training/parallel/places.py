"""Where a rank's values lie in a whole tensor, and what two such places have in common. No communication."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Place:
    """``count`` runs of ``run`` values in storage order, the first at ``first``, each ``stride`` after the one before."""

    first: int
    run: int
    stride: int
    count: int

    @staticmethod
    def of_range(begin: int, end: int) -> Place:
        """A range of values."""
        return Place(begin, end - begin, max(1, end - begin), 1)

    @property
    def values(self) -> int:
        """How many there are."""
        return self.run * self.count

    def of(self, whole: Tensor) -> Tensor:
        """These values of a whole tensor, as a vector."""
        flat = whole.reshape(-1)
        return flat.as_strided((self.count, self.run), (self.stride, 1), flat.storage_offset() + self.first).reshape(-1)

    def copy(self, mine: Tensor, there: Place, theirs: Tensor) -> int:
        """Copy into ``mine``, the values here, those of ``theirs``, the values there, that are the same.

        Returns how many.
        """
        if (self.stride, self.count) == (there.stride, there.count) and self.count > 1 and self._aligned(there):
            low, high = max(self.first, there.first), min(self.first + self.run, there.first + there.run)
            if high <= low:
                return 0
            rows, columns = mine.view(self.count, -1), theirs.view(self.count, -1)
            rows[:, low - self.first : high - self.first] = columns[:, low - there.first : high - there.first]
            return (high - low) * self.count
        copied = 0
        for i in range(self.count):
            begin = self.first + i * self.stride
            j = max(0, (begin - there.first - there.run) // there.stride)
            while j < there.count and (other := there.first + j * there.stride) < begin + self.run:
                low, high = max(begin, other), min(begin + self.run, other + there.run)
                if high > low:
                    at, source = i * self.run - begin, j * there.run - other
                    mine[at + low : at + high] = theirs[source + low : source + high]
                    copied += high - low
                j += 1
        return copied

    def _aligned(self, other: Place) -> bool:
        """True if the runs of both lie in the same rows of ``stride`` values."""
        return max(self.first + self.run, other.first + other.run) <= self.stride
