"""Batched decoding of a transformers causal model with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ostinato.rollout.config import SamplingParams
from ostinato.rollout.sampling import sample, token_filter
from ostinato.rollout.seeding import row_uniforms

_UNIFORM_BLOCK = 64  # token positions whose random numbers are made at once; even
_KEEP_SHARE = 0.75  # a batch is compacted once no more than this share of it is still decoding
_LOOK_EVERY = {"cpu": 1}  # steps between looks at which rows have ended, by device type
_LOOK_EVERY_ELSEWHERE = 8  # each look waits for the device


@dataclass(frozen=True)
class Decoded:
    """What came out of a batch of prompts.

    Attributes:
        token_ids: (B,R) int64; anything at and behind `lengths`.
        log_probs: (B,R) float32; anything at and behind `lengths`.
        lengths: (B,) int64, end token included.
        stopped: (B,) bool, True where an end token ended the response.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor


@dataclass(frozen=True)
class DecodeRequest:
    """A batch of prompts and what to do with it.

    Attributes:
        input_ids: (B,P) int64, left-padded.
        lengths: (B,) int64, tokens of each prompt, at least 1.
        limits: (B,) int64, most response tokens of each row, at least 1.
        rollout_ids: (B,) int64, keys of the random streams.
        sampling: how to draw.
        eos_token_ids: tokens that end a response; may be empty.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    rollout_ids: np.ndarray
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]

    def rows(self, index: torch.Tensor) -> DecodeRequest:
        """Some of the rows, without the padding columns that none of them needs."""
        lengths = self.lengths[index]
        return DecodeRequest(
            input_ids=self.input_ids[index, self.input_ids.shape[1] - int(lengths.max()) :],
            lengths=lengths,
            limits=self.limits[index],
            rollout_ids=self.rollout_ids[index.numpy()],
            sampling=self.sampling,
            eos_token_ids=self.eos_token_ids,
        )


class GrowingLayer(DynamicLayer):
    """A cache layer that writes in place and grows by blocks, where its parent copies everything for each token.

    Args:
        keys: (B,H,L,D) what is cached so far.
        values: (B,H,L,D) likewise.
        most: tokens that the layer will hold at most; no memory is taken beyond.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, most: int):
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._most = most
        self._used = keys.shape[-2]
        self._buffers = (keys, values)
        self._set_views()

    def _set_views(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._used] for buffer in self._buffers)

    def _reserve(self, needed: int) -> None:
        capacity = self._buffers[0].shape[-2]
        if needed <= capacity:
            return
        capacity = max(needed, min(self._most, capacity + max(128, capacity // 2)))

        def grown(buffer: torch.Tensor) -> torch.Tensor:
            batch, heads, _, size = buffer.shape
            bigger = buffer.new_empty(batch, heads, capacity, size)
            bigger[:, :, : self._used] = buffer[:, :, : self._used]
            return bigger

        self._buffers = (grown(self._buffers[0]), grown(self._buffers[1]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append some tokens' keys and values and return all."""
        end = self._used + key_states.shape[-2]
        self._reserve(end)
        self._buffers[0][:, :, self._used : end] = key_states
        self._buffers[1][:, :, self._used : end] = value_states
        self._used = end
        self._set_views()
        return self.keys, self.values  # pyright: ignore[reportReturnType]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        self._buffers = (self._buffers[0][indices], self._buffers[1][indices])
        self._set_views()


def first_occurrences(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are new, and which of those each row equals.

    Args:
        rows: (B,P) any dtype.

    Returns:
        `first` (U,) row numbers of the distinct rows in order of appearance, and `inverse` (B,) with
        rows[first[inverse]] == rows.
    """
    known: dict[bytes, int] = {}
    first: list[int] = []
    inverse = np.empty(len(rows), dtype=np.int64)
    for i, row in enumerate(rows):
        place = known.setdefault(row.tobytes(), len(first))
        if place == len(first):
            first.append(i)
        inverse[i] = place
    return np.asarray(first, dtype=np.int64), inverse


class Decoder:
    """Decodes batches with one model.

    Args:
        model: a transformers causal language model in eval mode.
        max_num_seqs: most rows decoded at once.
        max_num_batched_tokens: most prompt tokens (padding counted) run at once, one row at least.
    """

    def __init__(self, model: Any, *, max_num_seqs: int, max_num_batched_tokens: int):
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    @torch.inference_mode()
    def decode(self, request: DecodeRequest, device: torch.device) -> Decoded:
        """Answer all rows, `max_num_seqs` at a time, rows of like prompt length together.

        Args:
            request: at least one row; its tensors on the CPU.
            device: where the model is.

        Returns:
            Answers in the order of the request, on the CPU; R is the largest limit.
        """
        batch, width = len(request.lengths), int(request.limits.max())
        out = Decoded(
            torch.zeros(batch, width, dtype=torch.int64),
            torch.zeros(batch, width),
            torch.zeros(batch, dtype=torch.int64),
            torch.zeros(batch, dtype=torch.bool),
        )
        order = torch.argsort(request.lengths, stable=True)
        for index in order.split(self._max_num_seqs):
            self._decode_chunk(request.rows(index), index, out, device)
        return out

    def _decode_chunk(self, request: DecodeRequest, index: torch.Tensor, out: Decoded, device: torch.device) -> None:
        prompt_width, most = request.input_ids.shape[1], int(request.limits.max())
        logits, cache = self._prefill(request, prompt_width + most, device)
        run = _Run(request, index, out, device)
        while True:
            tokens, finished = run.step(logits)
            if finished:
                return
            keep = run.compact()
            if keep is not None:
                cache.batch_select_indices(keep)
                tokens = tokens[keep]
            outputs = self._model(
                input_ids=tokens[:, None],
                attention_mask=run.attention_mask(),
                position_ids=run.position_ids(),
                past_key_values=cache,
                use_cache=True,
            )
            logits = outputs.logits[:, -1]

    def _prefill(self, request: DecodeRequest, most: int, device: torch.device) -> tuple[torch.Tensor, DynamicCache]:
        """Run each distinct prompt once; the samples of one prompt then share a copy of its cache."""
        width = request.input_ids.shape[1]
        first, inverse = first_occurrences(np.column_stack([request.input_ids.numpy(), request.lengths.numpy()]))
        rows_at_once = max(1, self._max_num_batched_tokens // width)
        pieces = [
            self._prefill_piece(request.input_ids[piece], request.lengths[piece], device)
            for piece in torch.from_numpy(first).split(rows_at_once)
        ]
        logits = torch.cat([piece[0] for piece in pieces])
        cache = _merge_caches([piece[1] for piece in pieces])
        if len(first) < len(inverse):
            rows = torch.from_numpy(inverse).to(device)
            logits = logits[rows]
            cache.batch_select_indices(rows)
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
                cache.layers[i] = GrowingLayer(layer.keys, layer.values, most)
        return logits, cache

    def _prefill_piece(
        self, input_ids: torch.Tensor, lengths: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, DynamicCache]:
        width = input_ids.shape[1]
        mask = torch.arange(width) >= width - lengths[:, None]
        cache = DynamicCache(config=self._model.config)
        outputs = self._model(
            input_ids=input_ids.to(device),
            attention_mask=None if bool(mask.all()) else mask.long().to(device),
            position_ids=(torch.arange(width) - (width - lengths[:, None])).clamp(min=0).to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return outputs.logits[:, -1], cache


def _merge_caches(caches: list[DynamicCache]) -> DynamicCache:
    """One cache of all rows. Layers that keep something else than keys and values of each token are refused."""
    merged = caches[0]
    if len(caches) == 1:
        return merged
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        if type(layers[0]) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise NotImplementedError(
                f"hf rollout: cache layers of type {type(layers[0]).__name__} cannot be joined over prompts. "
                "Raise actor_rollout_ref.rollout.max_num_batched_tokens or lower max_num_seqs."
            )
        layers[0].keys = torch.cat([layer.keys for layer in layers])  # pyright: ignore[reportArgumentType]
        layers[0].values = torch.cat([layer.values for layer in layers])  # pyright: ignore[reportArgumentType]
    return merged


class _Run:
    """The state of one batch while it decodes; everything is per batch, nothing is done row by row."""

    def __init__(self, request: DecodeRequest, index: torch.Tensor, out: Decoded, device: torch.device):
        self._request = request
        self._out = out
        self._device = device
        self._every = _LOOK_EVERY.get(device.type, _LOOK_EVERY_ELSEWHERE)
        self._restrict: Callable[[torch.Tensor], torch.Tensor] | None = token_filter(request.sampling)
        width = request.input_ids.shape[1]
        self._width = width
        self._most = int(request.limits.max())
        self._places = index  # rows of `out`, on the CPU
        self._ids = request.rollout_ids
        self._limits = request.limits.to(device)
        self._prompt_lengths = request.lengths.to(device)
        padded = bool((request.lengths < width).any())
        columns = torch.arange(width + self._most, device=device)
        self._mask = (columns >= width - self._prompt_lengths[:, None]).long() if padded else None
        self._eos = torch.tensor(request.eos_token_ids, dtype=torch.int64, device=device)
        self._lengths = torch.zeros_like(self._limits)
        self._alive = torch.ones_like(self._limits, dtype=torch.bool)
        self._stopped = torch.zeros_like(self._alive)
        self._uniforms: torch.Tensor | None = None
        self._t = 0  # response tokens drawn so far
        self._start = 0  # of the tokens not yet written to `out`
        self._tokens: list[torch.Tensor] = []
        self._log_probs: list[torch.Tensor] = []
        self._num_alive = len(index)

    def attention_mask(self) -> torch.Tensor | None:
        """(b, L) over prompt and drawn tokens, or None where nothing is padded."""
        return None if self._mask is None else self._mask[:, : self._width + self._t]

    def position_ids(self) -> torch.Tensor:
        """(b, 1) of the tokens drawn last; a finished row that is still carried along never leaves its context."""
        return (self._prompt_lengths + (self._limits - 1).clamp(max=self._t - 1))[:, None]

    def step(self, logits: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Draw the next token of every row; say whether that was the last step."""
        sampling = self._request.sampling
        uniforms = None if sampling.greedy else self._next_uniforms(sampling)
        tokens, log_probs = sample(logits, uniforms, sampling, self._restrict)
        self._tokens.append(tokens)
        self._log_probs.append(log_probs)
        self._t += 1
        self._lengths += self._alive
        done = self._lengths >= self._limits
        if len(self._eos):
            ended = torch.isin(tokens, self._eos) & self._alive
            self._stopped |= ended
            done |= ended
        self._alive &= ~done
        last = self._t >= self._most
        if last or self._t % self._every == 0:
            self._num_alive = 0 if last else int(self._alive.sum())
        if self._num_alive == 0:
            self._flush()
            return tokens, True
        return tokens, False

    def _next_uniforms(self, sampling: SamplingParams) -> torch.Tensor:
        offset = self._t % _UNIFORM_BLOCK
        if offset == 0 or self._uniforms is None:
            count = min(_UNIFORM_BLOCK, self._most - self._t)
            block = row_uniforms(sampling.seed, sampling.step, self._ids, self._t, count)
            self._uniforms = torch.from_numpy(np.ascontiguousarray(block.T)).to(self._device)
        return self._uniforms[offset]

    def _flush(self) -> None:
        """Write what was drawn since the last flush to the rows of `out`."""
        end = self._start + len(self._tokens)
        self._out.token_ids[self._places, self._start : end] = torch.stack(self._tokens, 1).cpu()
        self._out.log_probs[self._places, self._start : end] = torch.stack(self._log_probs, 1).cpu()
        self._out.lengths[self._places] = self._lengths.cpu()
        self._out.stopped[self._places] = self._stopped.cpu()
        self._tokens, self._log_probs, self._start = [], [], end

    def compact(self) -> torch.Tensor | None:
        """Drop finished rows where enough have finished; gives the rows that stay, or None where all do."""
        if self._num_alive > _KEEP_SHARE * len(self._places):
            return None
        self._flush()
        keep = self._alive.nonzero().flatten()
        on_host = keep.cpu()
        self._places, self._ids = self._places[on_host], self._ids[on_host.numpy()]
        self._limits, self._prompt_lengths = self._limits[keep], self._prompt_lengths[keep]
        self._lengths, self._alive, self._stopped = self._lengths[keep], self._alive[keep], self._stopped[keep]
        self._mask = None if self._mask is None else self._mask[keep]
        if self._uniforms is not None:
            self._uniforms = self._uniforms[:, keep]
        return keep
