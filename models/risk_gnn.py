"""Risk-sensitive graph network: attention whose logits carry a bias that grows with each edge's danger (TTC, THW)."""
import torch
import torch.nn.functional as F
from torch import nn

from models.presets import Normalizer, mlp

NODE_FEATURES = 9
POSITION, SPEED, PROGRESS, ICV = 0, 2, 5, 6  # columns of a node
URGENCY = 10.0  # s; times to collision are mostly long: unscaled, this input would hardly vary
WHERE = [0, 1, 2, 6]  # columns of `edge_inputs` without TTC and THW
DANGER_WEIGHT = 2.0  # to begin with, before the softplus: a TTC of 1 s counts four times one of more than 20 s
INPUTS = ("nodes", "surround", "edges", "neighbours", "mask")  # what `RiskGNN.forward` takes, in its order
NODE_MEAN = [0.5, 0.5, 15.0, 0.0, 250.0, 0.5, 0.0, 0.0, 0.0]
NODE_STD = [0.3, 1.0, 8.0, 5.0, 200.0, 0.3, 1.0, 1.0, 1.0]  # acceleration: clamped to +-5 when observed, then / 5


def edge_inputs(edges, lead_gap, lead_speed):
    """[..., k, 4] gap m, relative speed m/s, TTC s, THW s -> [..., k, 7] bounded features, the two dangers among them.

    The last one marks the leader: the neighbour whose gap and relative speed are those of `lead_gap` m and `lead_speed`
    m/s relative to the vehicle, each [...].
    """
    gap, dv, ttc, thw = edges.float().unbind(-1)
    closeness = gap.sign() / (1 + gap.abs() / 5)
    leads = torch.exp(-(gap - lead_gap[..., None]).abs() - (dv - lead_speed[..., None]).abs())
    return torch.stack([gap / 50, closeness, dv / 10, URGENCY / (ttc + 0.5), 1 / (thw + 0.3), thw / 5, leads], -1)


def dangers(edges):
    """[..., 4] as in `edge_inputs` -> [..., 2], 1 at a TTC and a THW of 0 s, 1/2 at 3 s and at 1 s."""
    ttc, thw = edges[..., 2:].float().unbind(-1)
    return torch.stack([3 / (3 + ttc), 1 / (1 + thw)], -1)


def surround_inputs(surround, speed):
    """Surroundings [..., 14] as observed, own speed m/s [...] -> [..., 24] bounded features.

    Gap, closeness, relative speed and urgency (inverse time to collision) of the five who matter: in front; in front
    and behind on the left; the same on the right. Then which lanes exist, and how near and full a merge is.
    """
    gap, other = surround[..., :10].float().unflatten(-1, (5, 2)).unbind(-1)
    dv = other - speed[..., None].float()
    closing = dv * dv.new_tensor([-1, -1, 1, -1, 1])  # columns 2 and 4 are behind
    ttc = gap.clamp(min=0) / closing.clamp(min=0.1)
    urgency = (URGENCY / (ttc + 0.5)).clamp(max=5)
    pairs = torch.cat([gap / 50, 1 / (1 + gap.clamp(min=0) / 5), dv / 10, urgency], -1)
    scale = pairs.new_tensor([1, 1, 250, 5])
    return torch.cat([pairs, surround[..., 10:].float() / scale], -1)


class RiskAttention(nn.Module):
    """One layer: attention over a vehicle's neighbours and itself with a risk bias, then a feed-forward part.

    The bias is a learned one of who the neighbour is, plus the dangers times weights that cannot be negative: whoever
    it is, a shorter TTC or THW draws more attention.
    """

    def __init__(self, width, heads, edge_width, learned=False):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Linear(edge_width, heads)
        self.danger = None if learned else nn.Parameter(torch.full((heads, 2), DANGER_WEIGHT))
        self.ff = mlp(width, 4 * width, width)

    def forward(self, x, neighbours, edge_code, danger, dense):
        """x [B, N, D], neighbours [B, N, k] with N for "none", edge_code [B, N, k, edge_width], danger [B, N, k, 2] ->
        [B, N, D]."""
        b, n, d = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.view(b, n, self.heads, d // self.heads).transpose(1, 2) for t in parts)
        bias = self.bias(edge_code)
        if self.danger is not None:
            bias = bias + F.linear(danger, F.softplus(self.danger))
        bias = bias.permute(0, 3, 1, 2)  # [B, heads, N, k]
        mixed = (self._dense if dense else self._gather)(q, k, v, bias, neighbours)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return x + self.ff(self.norm2(x))

    def _dense(self, q, k, v, bias, neighbours):
        """Scatter the biases into [B, heads, N, N]; -inf elsewhere; a vehicle always sees itself (no empty rows)."""
        b, h, n, _ = q.shape
        mask = q.new_full((b, h, n, n + 8), float("-inf"))  # + 8: CUDA's kernels want aligned rows
        mask.scatter_(3, neighbours[:, None].expand(-1, h, -1, -1), bias.to(q.dtype))  # column N swallows "none"
        mask = mask[..., :n]
        mask.diagonal(dim1=2, dim2=3).zero_()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _gather(self, q, k, v, bias, neighbours):
        """The same for large graphs: k + 1 gathered keys and values per vehicle instead of N."""
        b, h, n, d = q.shape
        itself = torch.arange(n, device=q.device).expand(b, n)[..., None]
        where = torch.cat([neighbours, itself], -1)
        none = (where == n)[:, None]
        pick = where.clamp(max=n - 1).flatten(1)[:, None, :, None].expand(-1, h, -1, d)
        keys, values = (t.gather(2, pick).view(b, h, *where.shape[1:], d) for t in (k, v))
        logits = (q[..., None, :] * keys).sum(-1) / d ** 0.5 + F.pad(bias, (0, 1))
        weights = logits.float().masked_fill(none, float("-inf")).softmax(-1)
        return (weights.to(values.dtype)[..., None] * values).sum(3)


class RiskGNN(nn.Module):
    """Vehicles' features and their relations -> one embedding per vehicle.

    With `learned`, the attention's bias is learned from all of an edge's features: nothing makes it grow with danger.
    """

    def __init__(self, sizes, gather_above=512, learned=False):
        super().__init__()
        self.gather_above = gather_above
        self.normalize = Normalizer(NODE_MEAN, NODE_STD)
        self.edge = mlp(7, sizes.edge_width, sizes.edge_width)
        self.relation = None if learned else mlp(len(WHERE), sizes.edge_width, sizes.edge_width)
        self.risk = nn.Linear(sizes.edge_width, 1)
        self.node = mlp(NODE_FEATURES + 24 + sizes.edge_width, sizes.gnn_width, sizes.gnn_width)
        self.layers = nn.ModuleList(RiskAttention(sizes.gnn_width, sizes.gnn_heads, sizes.edge_width, learned)
                                    for _ in range(sizes.gnn_layers))
        self.norm = nn.LayerNorm(sizes.gnn_width)

    def forward(self, nodes, surround, edges, neighbours, mask):
        """nodes [B, N, 9], surround [B, N, 14], edges [B, N, k, 4], neighbours [B, N, k] (-1 = none), mask [B, N] ->
        [B, N, D].

        Rows outside the mask are 0. Neighbours must lie inside the mask.
        """
        none = neighbours < 0
        where = neighbours.long().masked_fill(none, nodes.shape[1])
        speed = nodes[..., SPEED].float()
        inputs = edge_inputs(edges, surround[..., 0].float(), surround[..., 1].float() - speed)
        code = F.silu(self.edge(inputs))
        who = code if self.relation is None else F.silu(self.relation(inputs[..., WHERE]))
        danger = dangers(edges)
        # What the edges say reaches the vehicle with a learned weight.
        weight = self.risk(code).float().squeeze(-1).masked_fill(none, -1e4).softmax(-1)
        around = (weight.masked_fill(none, 0)[..., None] * code.float()).sum(2)
        x = self.node(torch.cat([self.normalize(nodes), surround_inputs(surround, speed), around], -1))
        # With no scene at all (a rank without rows) PyTorch's attention gives its mask no gradient; DDP waits for one.
        dense = nodes.shape[1] <= self.gather_above and len(nodes) > 0
        for layer in self.layers:
            x = layer(x, where, who, danger, dense)
        return self.norm(x) * mask[..., None]
