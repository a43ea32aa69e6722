"""Rotary position embedding as the kernels need it: the model's own table, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RotaryTable"]


@dataclass(frozen=True)
class RotaryTable:
    """cos/sin of one model, taken from its own rotary module.

    ``cos_sin`` is float32 ``[max_positions, rotary_dim]``, the cosines of all
    frequencies first, then the sines (SGLang's ``cos_sin_cache``). A scaling
    factor folded into the table (YaRN's ``mscale``) is allowed. Only the first
    ``rotary_dim`` channels of a head are rotated. ``is_neox`` pairs channel ``j``
    with ``j + rotary_dim / 2``, otherwise ``2j`` with ``2j + 1``.
    """

    cos_sin: torch.Tensor
    is_neox: bool

    @property
    def rotary_dim(self) -> int:
        """Channels that are rotated, from the first on."""
        return int(self.cos_sin.shape[1])

    @property
    def max_positions(self) -> int:
        """Positions that the table knows."""
        return int(self.cos_sin.shape[0])

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., head_dim]`` as a key or query at ``positions``, in float32.

        ``positions`` broadcasts against ``x.shape[:-1]``.
        """
        x = x.float()
        first, second = self._split(x)
        cos, sin = self._lookup(positions)
        return self._join(x, first * cos - second * sin, second * cos + first * sin)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of ``rotate`` (a folded-in scaling factor is divided out)."""
        x = x.float()
        first, second = self._split(x)
        cos, sin = self._lookup(positions)
        norm = cos * cos + sin * sin
        return self._join(
            x, (first * cos + second * sin) / norm, (second * cos - first * sin) / norm
        )

    def in_window(self, window: int) -> torch.Tensor:
        """The table of offsets ``[window, rotary_dim]`` to rotate by after a window's base.

        ``rotate(x, p0 + i)`` is the rotation by ``in_window[i]``, then by ``cos_sin[p0]``: a
        folded-in scaling factor belongs to the base alone, so it is divided out here.
        """
        cos, sin = self.cos_sin[:window].chunk(2, dim=1)
        scale = self.cos_sin[0, : self.rotary_dim // 2]
        return torch.cat([cos / scale, sin / scale], dim=1).contiguous()

    def require_linear(self, window: int = 32) -> None:
        """Raise ``ValueError`` unless ``cos_sin[p0 + i]`` is ``cos_sin[p0]`` and offset ``i``.

        The kernels rotate a window by its base and then by constant offsets. That needs angles
        linear in the position, which dynamic variants such as longrope are not. Window starts
        all over the table are checked; the tolerance grows with the position as the float32
        rounding of an angle does.
        """
        count = self.max_positions
        if self.cos_sin.dtype != torch.float32 or self.rotary_dim % 2:
            raise ValueError(
                "the rotary table must be float32 with an even number of columns, "
                f"got {self.cos_sin.dtype} {list(self.cos_sin.shape)}"
            )
        window = min(window, count)
        offset_cos, offset_sin = self.in_window(window).double().chunk(2, dim=1)
        starts = torch.arange(0, count - window + 1, max(window, count // 256))
        cos, sin = self.cos_sin[starts].double().unsqueeze(1).chunk(2, dim=2)
        composed = torch.cat(
            [cos * offset_cos - sin * offset_sin, sin * offset_cos + cos * offset_sin], dim=2
        )
        positions = starts.unsqueeze(1) + torch.arange(window)
        error = (composed - self.cos_sin[positions].double()).abs().amax(dim=2)
        size = self.cos_sin[0].abs().max()
        # An angle p * theta is rounded to 2**-24 of itself, both at p0 and at p0 + i.
        tolerance = size * (1e-5 + positions * 2.0**-22)
        bad = (~(error <= tolerance)).nonzero()
        if len(bad):
            position = int(positions[bad[0, 0], bad[0, 1]])
            raise ValueError(
                "the rotary embedding is not linear in the position "
                f"(first seen at position {position}), as with longrope: "
                "use a model whose rotary scaling is none, linear, llama3 or yarn"
            )

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = x[..., : self.rotary_dim]
        if self.is_neox:
            first, second = rotated.chunk(2, dim=-1)
            return first, second
        return rotated[..., 0::2], rotated[..., 1::2]

    def _join(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if self.is_neox:
            rotated = torch.cat([first, second], dim=-1)
        else:
            rotated = torch.stack([first, second], dim=-1).flatten(-2)
        return torch.cat([rotated, x[..., self.rotary_dim :]], dim=-1)

    def _lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.cos_sin[positions.long()].chunk(2, dim=-1)
        return cos, sin
