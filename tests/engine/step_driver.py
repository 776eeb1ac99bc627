"""A scheduler as small as can be: fills step buffers by hand for a few lanes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from blinkc.engine.cpu import SAMPLE_ENABLED, CpuModel


@dataclass
class Request:
    """One sequence: its tokens so far, how many are in the KV cache, and how to sample."""

    tokens: list[int]
    lane: int
    done: int = 0
    num_prompt: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)


@dataclass
class StepDriver:
    """Runs requests through a model; pages of a lane are handed out in a scattered order."""

    model: CpuModel
    launch: int = 0
    keys: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 1})
    padding_ids: tuple[int, ...] = (0,)  # in turn, for tokens that belong to nobody

    def __post_init__(self) -> None:
        pages = self.model.max_pages_per_lane
        lanes = self.model.max_batch
        for lane in range(lanes):
            for i in range(pages):
                self.model.page_table[lane, i] = 1 + i * lanes + lane
        self.model.page_table[lanes] = 0

    def step(self, requests: list[Request], chunk: int = 1 << 30) -> list[int]:
        """Feed every request's unseen tokens (at most `chunk` each) and append what it samples."""
        m, token = self.model, 0
        most = 1
        for row, request in enumerate(requests):
            new = request.tokens[request.done : request.done + chunk]
            most = max(most, len(new))
            m.row_query_start[row] = token
            for offset, value in enumerate(new):
                m.input_ids[token] = value
                m.positions[token] = request.done + offset
                m.token_row[token] = row
                token += 1
            request.done += len(new)
            m.row_kv_len[row] = request.done
            m.row_lane[row] = request.lane
            m.sample_token[row] = token - 1
            sampling = m.sampling[row]
            whole = request.done == len(request.tokens)
            sampling["flags"] = SAMPLE_ENABLED if whole else 0
            sampling["seed"] = request.seed
            sampling["token_index"] = len(request.tokens) - request.num_prompt
            sampling["temperature"] = request.temperature
            sampling["top_k"] = request.top_k
            sampling["top_p"] = request.top_p
        m.row_query_start[len(requests)] = token
        self._pad(token, len(requests))
        self.launch += 1
        state = m.state[0]
        state["launch"] = self.launch
        state["num_tokens"], state["num_rows"] = token, len(requests)
        m.launch(self.keys["decode" if most == 1 else "prefill"])
        assert state["completion"] == self.launch
        sampled = []
        for row, request in enumerate(requests):
            if request.done == len(request.tokens):
                request.tokens.append(int(m.sampled_ids[row]))
            sampled.append(int(m.sampled_ids[row]))
        return sampled

    def _pad(self, num_tokens: int, num_rows: int) -> None:
        m = self.model
        m.token_row[num_tokens:] = -1
        m.input_ids[num_tokens:] = np.resize(self.padding_ids, len(m.input_ids) - num_tokens)
        m.positions[num_tokens:] = 0
        m.row_kv_len[num_rows:] = 0
        m.row_lane[num_rows:] = m.max_batch
        m.sample_token[num_rows:] = 0
        m.sampling["flags"][num_rows:] = 0
