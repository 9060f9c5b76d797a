"""Forward passes over prompts, as programs on a CPU."""

from __future__ import annotations

from collections import OrderedDict
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

    From a kind's second pass on, passes are recorded, each of which takes longer than one that runs
    op by op, until recordings of fewer and of more tokens agree on what is called. What cannot be
    recorded runs op by op, with sequences that decode beside prompts, and with images.

    Attributes:
        was_replayed: whether the last pass was.
    """

    def __init__(self, forward: ForwardOp, recorder: StepRecorder) -> None:
        self._forward = forward
        self._recorder = recorder
        self._programs: OrderedDict[Hashable, list[DynamicProgram]] = OrderedDict()
        self.was_replayed = False

    def __call__(self, model_input: ModelInput) -> ModelOutput:
        self.was_replayed = False
        lens, kind = model_input.attention.query_lens_cpu, _kind(model_input)
        are_prompts = len(lens) == 1 or min(lens) > MAX_DECODE_QUERIES
        if not are_prompts or model_input.images is not None:
            return self._forward(model_input)
        rows, inputs, programs = sum(lens), model_input.tensors, self._of_kind(kind)
        program = next((known for known in programs or () if known.holds(rows)), None)
        self.was_replayed = program is not None
        if program is None:
            if programs is None or self._recorder.refuses(_NAME, kind):
                return self._forward(model_input)
            self._recorder.note_unusual()
            try:
                program = self._record(programs, model_input, inputs)
            except NotRecordableError as error:
                self._recorder.refuse(_NAME, kind, error)
                return self._forward(model_input)
        hidden, *aux = program.run(rows, inputs)
        of_rows = None if len(hidden) == rows else model_input.output_rows
        return ModelOutput(hidden, tuple(aux), of_rows)

    def _of_kind(self, kind: Hashable) -> list[DynamicProgram] | None:
        """Its programs; None the first time."""
        known = self._programs.get(kind)
        self._programs.setdefault(kind, [])
        self._programs.move_to_end(kind)
        if len(self._programs) > _MOST_KINDS:
            self._programs.popitem(last=False)
        return known

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


def _kind(model_input: ModelInput) -> Hashable:
    """What decides which tensors a pass has, and their sizes, but for the number of tokens."""
    rows, shifts = model_input.output_rows, model_input.mrope_shifts
    named = None if rows is None else rows.shape
    return model_input.attention.block_tables.shape, named, shifts is None
