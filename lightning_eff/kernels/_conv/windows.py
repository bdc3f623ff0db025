"""Windows of layers along one axis: sizes, and the interval of the input that outputs are computed from.

    gathered (convolution, pooling): output o reads inputs o * stride - low + t * dilation, 0 <= t < kernel
    scattered (transposed, nearest): input i adds to outputs i * stride - low + t * dilation

Intervals are `(first, end)`; those that are needed may begin before 0 or end after the axis.
"""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """The window of a gathering layer along one axis; the default is that of a pointwise layer.

    Args:
        kernel: Taps.
        stride: Inputs between the windows of two outputs.
        dilation: Inputs between two taps.
        low: Padding before the first input.
        high: Padding after the last one.
        ceil_mode: Whether a last window that is cut by the border counts.
        mirrored: Whether the padding repeats the inputs at the border in reverse.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    low: int = 0
    high: int = 0
    ceil_mode: bool = False
    mirrored: bool = False

    @property
    def span(self) -> int:
        """Return the inputs from the first tap to the last."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, length: int) -> int:
        """Return the number of outputs; 0 or less where the input is too short.

        Example:
            >>> Window(kernel=3, stride=2, low=1, high=1).size(8)
            4
            >>> Window(kernel=2, stride=2, ceil_mode=True).size(7)
            4
        """
        free = length + self.low + self.high - self.span
        if not self.ceil_mode:
            return free // self.stride + 1
        count = -(-free // self.stride) + 1
        # The last window begins inside the input or the padding before it.
        return count - ((count - 1) * self.stride >= length + self.low)

    def needed(self, wanted: Interval) -> Interval:
        """Return the inputs that some outputs read.

        Example:
            >>> Window(kernel=3, low=1, high=1).needed((0, 4))
            (-1, 5)
        """
        first, end = wanted
        return first * self.stride - self.low, (end - 1) * self.stride - self.low + self.span

    def held(self, wanted: Interval, length: int) -> Interval:
        """Return the inputs that have to be there: one at least, and those that the padding mirrors."""
        first, end = self.needed(wanted)
        if self.mirrored:
            first, end = min(first, 2 * length - 1 - end) if end > length else first, max(end, 1 - first)
        return _inside((first, end), length)


@dataclass(frozen=True)
class Scattered:
    """The window of a transposed convolution along one axis.

    Args:
        kernel: Taps.
        stride: Outputs between the taps of two inputs.
        dilation: Outputs between two taps.
        low: Outputs that are cut off at either end.
        output_padding: Outputs that are added to the last.
    """

    kernel: int
    stride: int
    dilation: int = 1
    low: int = 0
    output_padding: int = 0

    @property
    def span(self) -> int:
        """Return the outputs from the first tap to the last."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, length: int) -> int:
        """Return the number of outputs.

        Example:
            >>> Scattered(kernel=3, stride=2, low=1, output_padding=1).size(4)
            8
        """
        return (length - 1) * self.stride - 2 * self.low + self.span + self.output_padding

    def held(self, wanted: Interval, length: int) -> Interval:
        """Return the inputs that add to some outputs, or whose outputs begin before them; one at least."""
        first, end = wanted[0] + self.low, wanted[1] + self.low
        earliest = min(-(-(first - self.span + 1) // self.stride), first // self.stride)
        return _inside((earliest, (end - 1) // self.stride + 1), length)

    def made(self, held: Interval) -> Interval:
        """Return the outputs that some inputs make, without any cut off."""
        return held[0] * self.stride - self.low, (held[1] - 1) * self.stride - self.low + self.span


def _inside(interval: Interval, length: int) -> Interval:
    """Return what of an interval is inside an axis; the input next to it where nothing is."""
    first = min(max(interval[0], 0), length - 1)
    return first, max(min(interval[1], length), first + 1)
