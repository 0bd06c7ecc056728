"""Progressive world model: per-vehicle memory over GNN embeddings, two latents, and decoders of the near future.

Stage 1 predicts the next state of every vehicle. Stage 2 predicts the next H states from the flow latent and a
probability of conflict for each of those steps from the risk latent.
"""
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.presets import mlp

CHANGE_SCALE = 5.0  # embeddings change little in one step
CORRECTION = 0.5  # of "constant velocity", m and m/s for each second ahead: what the decoders' 1 stands for
RARE = -4.6  # first logit of a conflict, 1 %: learning the rate alone would saturate the latent (Lin et al. 2017, 4.1)


class WorldModel(nn.Module):
    """LSTM over control steps (gates in float32 under autocast, vehicles as batch) and the decoders."""

    def __init__(self, sizes, horizon=5, interval=1.0):
        super().__init__()
        self.horizon, self.interval, self.width = horizon, interval, sizes.lstm_width
        self.cells = nn.ModuleList(nn.LSTMCell(sizes.gnn_width if i == 0 else sizes.lstm_width, sizes.lstm_width)
                                   for i in range(sizes.lstm_layers))
        self.present = nn.Linear(sizes.gnn_width, sizes.lstm_width)
        self.change = nn.Linear(sizes.gnn_width, sizes.lstm_width, bias=False)
        self.next_state = mlp(sizes.lstm_width, sizes.decoder_hidden, 2, final_gain=0.1)
        self.flow = nn.Linear(sizes.lstm_width, sizes.latent)
        self.risk = nn.Linear(sizes.lstm_width, sizes.latent)
        self.states = mlp(sizes.latent, sizes.decoder_hidden, sizes.decoder_hidden, 2 * horizon, final_gain=0.1)
        self.conflict = mlp(sizes.latent, sizes.decoder_hidden, sizes.decoder_hidden, horizon + 1, final_gain=0.1)
        nn.init.constant_(self.conflict[-1].bias, RARE)
        self.register_buffer("ahead", interval * torch.arange(1, horizon + 1), persistent=False)  # s

    def stage2_parameters(self):
        """Parameters that stage 1 does not use and therefore freezes."""
        return [p for part in (self.flow, self.risk, self.states, self.conflict) for p in part.parameters()]

    def initial_state(self, *batch, device=None):
        """Zero memory [*batch, layers + 1, 2 * width], float32: hidden and cell state of each layer side by side, then
        the embedding of the step before, padded."""
        return torch.zeros(*batch, len(self.cells) + 1, 2 * self.width, device=device)

    def step(self, embedding, state, fresh):
        """One control step. embedding [..., D], state as by `initial_state`, fresh [...] (True forgets the state).

        Returns (memory [..., width], new state).
        """
        with torch.autocast(embedding.device.type, enabled=False):
            shape, seen = embedding.shape[:-1], embedding.float().flatten(0, -2)
            state = (state.float() * ~fresh[..., None, None]).flatten(0, -3)
            x, new = seen, []
            for i, cell in enumerate(self.cells):
                h, c = cell(x, tuple(t.contiguous() for t in state[:, i].chunk(2, -1)))
                new.append(torch.cat([h, c], -1))
                x = h
            # What is seen now, and how it changes (accelerations above all), need no way through the gates.
            before = state[:, -1, :seen.shape[1]]
            change = (seen - before) * before.any(-1, keepdim=True)  # none of whoever was not there
            x = x + self.present(seen) + self.change(CHANGE_SCALE * change)
            new.append(F.pad(seen, (0, 2 * self.width - seen.shape[1])))
            return x.view(*shape, x.shape[1]), torch.stack(new, 1).view(*shape, len(new), 2 * self.width)

    def sequence(self, embeddings, state, fresh, checkpointing=False):
        """embeddings [B, T, N, D], state [B, N, ...], fresh [B, T, N] -> memory [B, T, N, width]."""
        step = functools.partial(checkpoint, self.step, use_reentrant=False) if checkpointing else self.step
        memories = []
        for t in range(embeddings.shape[1]):
            memory, state = step(embeddings[:, t], state, fresh[:, t])
            memories.append(memory)
        return torch.stack(memories, 1)

    def latents(self, memory):
        """(flow latent, risk latent), each [..., latent]."""
        return torch.tanh(self.flow(memory)), torch.tanh(self.risk(memory))

    def predict_next(self, memory, speed):
        """Stage 1: next displacement m and speed m/s, [..., 2], as corrections of "constant velocity"."""
        correction = self.next_state(memory).float() * (CORRECTION * self.interval)
        return correction + torch.stack([speed * self.interval, speed], -1)

    def predict_states(self, flow, speed):
        """Stage 2: displacement m and speed m/s after 1 to H control steps, [..., H, 2]."""
        correction = self.states(flow).float().unflatten(-1, (self.horizon, 2)) * (CORRECTION * self.ahead)[:, None]
        steady = speed[..., None].expand(*speed.shape, self.horizon)
        return correction + torch.stack([steady * self.ahead, steady], -1)

    def predict_conflict(self, risk):
        """Stage 2: logits of a conflict in each of the next H control steps, and last in any of them, [..., H + 1]."""
        return self.conflict(risk).float()
