"""A graph as a picture: a row an operator, from the inputs down; the darker, the more it multiplies."""

from __future__ import annotations

from html import escape

from torch.fx import Node

from penjing.core.graph.cost import Cost
from penjing.core.graph.network import Network
from penjing.core.progress import count

_ROW, _LEFT, _WIDE, _TALL, _LANE = 26, 16, 420, 18, 9
_LANES = 24


def svg(network: Network, found: list[Cost]) -> str:
    """The picture, as text of an `.svg` file; weights are left out."""
    by_node = {cost.node: cost for cost in found}
    total = max(sum(cost.macs for cost in found), 1)
    rows = [node for node in network.module.graph.nodes if node.op in ("placeholder", "call_function")]
    places = {node: row for row, node in enumerate(rows)}
    parts = [_arc(source, node, places) for node in rows for source in node.all_input_nodes if source in places]
    for node, row in places.items():
        cost = by_node.get(node)
        share = cost.macs / total if cost else 0.0
        shade = 96 - int(46 * min(share * 12, 1.0))
        fill = f"hsl(140, 40%, {shade}%)" if share else ("#e8eefc" if node.op == "placeholder" else "#f6f6f6")
        said = _said(node, cost)
        parts.append(
            f'<rect x="{_LEFT}" y="{row * _ROW + 8}" width="{_WIDE}" height="{_TALL}" rx="4" fill="{fill}" '
            f'stroke="#999"/><text x="{_LEFT + 8}" y="{row * _ROW + 21}">{escape(said)}</text>'
        )
    height, width = len(rows) * _ROW + 16, _LEFT + _WIDE + _LANE * (_LANES + 2)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="monospace" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _said(node: Node, cost: Cost | None) -> str:
    value = node.meta.get("val")
    shape = "x".join(map(str, getattr(value, "shape", ())))
    name = cost.operator if cost else ("input" if node.op == "placeholder" else getattr(node.target, "__name__", ""))
    macs = f"  {count(cost.macs)} MACs" if cost and cost.macs else ""
    return f"{node.name[:24]} = {name[:28]} {shape}{macs}"


def _arc(source: Node, node: Node, places: dict[Node, int]) -> str:
    """A straight line to the next row, a curve beside the boxes to a later one."""
    first, last = places[source] * _ROW + 8 + _TALL, places[node] * _ROW + 8
    if places[node] == places[source] + 1:
        return f'<path d="M{_LEFT + 20} {first}V{last}" stroke="#555" fill="none"/>'
    out = _LEFT + _WIDE
    lane = out + _LANE * (1 + min(places[node] - places[source], _LANES))
    top, end = first - _TALL // 2, last + _TALL // 2
    return f'<path d="M{out} {top}C{lane} {top} {lane} {end} {out} {end}" stroke="#88a" fill="none"/>'
