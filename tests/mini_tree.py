"""A prefix cache in miniature: a trie of pages, with locks and least-recently-used eviction."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

__all__ = ["MiniTree"]


@dataclass
class _Node:
    key: Hashable
    page: int
    parent: _Node | None
    children: dict[Hashable, _Node] = field(default_factory=dict)
    last_used: int = 0
    locks: int = 0


class MiniTree:
    """Maps sequences of page keys to pages, one node for each page."""

    def __init__(self) -> None:
        self._root = _Node(None, 0, None)
        self._now = 0

    def match(self, keys: list[Hashable]) -> list[int]:
        """Pages of the longest prefix that is there."""
        return [node.page for node in self._path(keys)]

    def lock(self, keys: list[Hashable], by: int) -> None:
        """Lock a path that is there, or unlock it with ``by`` -1."""
        for node in self._path(keys):
            node.locks += by

    def insert(self, keys: list[Hashable], pages: list[int]) -> int:
        """Adopt pages, except those of a prefix that is there; returns how long that is."""
        path = list(self._path(keys))
        parent = path[-1] if path else self._root
        for key, page in zip(keys[len(path) :], pages[len(path) :], strict=True):
            node = _Node(key, page, parent, last_used=self._now)
            parent.children[key] = node
            parent = node
        return len(path)

    def evict(self, may_go: Callable[[int], bool] | None = None) -> int | None:
        """Drop the unlocked leaf that was not used for longest; its page, or None.

        ``may_go``: of its page; None: any leaf.
        """
        leaves = [n for n in self._nodes() if not n.children and not n.locks]
        if may_go is not None:
            leaves = [n for n in leaves if may_go(n.page)]
        if not leaves:
            return None
        leaf = min(leaves, key=lambda node: node.last_used)
        assert leaf.parent is not None
        del leaf.parent.children[leaf.key]
        return leaf.page

    def pages(self) -> list[int]:
        """All pages."""
        return [node.page for node in self._nodes()]

    def unlocked(self) -> int:
        """How many pages could be evicted."""
        return sum(not node.locks for node in self._nodes())

    def clear(self) -> None:
        """Forget everything."""
        self._root.children.clear()

    def _path(self, keys: list[Hashable]) -> Iterator[_Node]:
        self._now += 1
        node = self._root
        for key in keys:
            if key not in node.children:
                return
            node = node.children[key]
            node.last_used = self._now
            yield node

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
