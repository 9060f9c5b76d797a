"""Forward passes over prompts, as programs on a CPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from atom.graphs.recorded import StepRecorder
from atom.graphs.runner import ForwardOp
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES, ModelInput, ModelOutput
from atom.model_ops.kernels.native.dynamic_program import DynamicProgram, trace
from atom.model_ops.kernels.native.recorder import NotRecordableError

_NAME = "a prompt"
# Kinds of steps that were used last, and for each, numbers of rows between which other kernels run.
_MOST_KINDS = 64
_MOST_RANGES = 8


class RecordedForward:
    """A model's layers, over prompts of any number of tokens.

    A pass is recorded, which takes about as long as running it op by op, until recordings of fewer
    and of more tokens agree on what it calls. What cannot be recorded runs op by op, with sequences
    that decode beside prompts, and with images.

    Attributes:
        was_replayed: whether the last pass was.
    """

    def __init__(self, forward: ForwardOp, recorder: StepRecorder) -> None:
        self._forward = forward
        self._recorder = recorder
        # The kinds that were used last are the last.
        self._programs: dict[Hashable, list[DynamicProgram]] = {}
        self.was_replayed = False

    def __call__(self, model_input: ModelInput) -> ModelOutput:
        self.was_replayed = False
        metadata = model_input.attention
        lens = metadata.query_lens_cpu
        are_prompts = len(lens) == 1 or min(lens) > MAX_DECODE_QUERIES
        is_text = model_input.images is None and model_input.mrope_shifts is None
        outputs = model_input.output_rows
        kind = metadata.block_tables.shape, None if outputs is None else outputs.shape
        if not (are_prompts and is_text) or self._recorder.refuses(_NAME, kind):
            return self._forward(model_input)
        rows, inputs = sum(lens), model_input.tensors
        programs = self._programs.pop(kind, [])
        program = next((known for known in programs if known.holds(rows)), None)
        self.was_replayed = program is not None
        if program is None:
            self._recorder.take_unusual()
            try:
                program = self._record(programs, model_input, inputs)
            except NotRecordableError as error:
                self._recorder.refuse(_NAME, kind, error)
                return self._forward(model_input)
        self._programs[kind] = programs
        if len(self._programs) > _MOST_KINDS:
            del self._programs[next(iter(self._programs))]
        hidden, *aux = program.run(rows, inputs)
        of_rows = None if len(hidden) == rows else model_input.output_rows
        return ModelOutput(hidden, tuple(aux), of_rows)

    def _record(
        self,
        programs: list[DynamicProgram],
        model_input: ModelInput,
        inputs: Sequence[torch.Tensor],
    ) -> DynamicProgram:
        """The program of a pass, new or one of those that are known of its kind.

        Raises:
            NotRecordableError: when there is none.
        """
        metadata = replace(model_input.attention, context_lens_cpu=None, most_context_cpu=None)

        def work() -> Sequence[torch.Tensor]:
            output = self._forward(replace(model_input, attention=metadata))
            return output.hidden_states, *output.aux_hidden_states

        recorded = trace(work, len(model_input.input_ids), inputs)
        for program in programs:
            if program.add(recorded):
                return program
        if len(programs) == _MOST_RANGES:
            raise NotRecordableError("its kernels' arguments do not grow evenly with its rows")
        programs.append(DynamicProgram(recorded, self._recorder.arena))
        return programs[-1]

    def release(self) -> None:
        """Drop all programs."""
        self._programs.clear()
