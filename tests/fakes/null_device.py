"""A device that computes nothing: it says how many tokens a step samples, and makes them up.

Costs next to nothing however many requests run, so that what a step costs everybody else can be
measured. Its tokens are right in number and mean nothing.
"""

from __future__ import annotations

from wire.messages import ModelRunnerOutput, SchedulerOutput, token_ids

TOKEN = 7


class NullDevice:
    """Keeps of each request only how far it is behind, and derives the decode batch's size."""

    def __init__(self) -> None:
        self.epoch = 0
        self._behind: dict[int, int] = {}  # request -> known tokens that are not computed
        self._decoding: set[int] = set()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        if step.is_fence:
            self._behind.clear()
            self._decoding.clear()
            self.epoch = step.epoch
        for req in (*step.finished_reqs, *step.preempted_reqs):
            self._decoding.discard(req)
            del self._behind[req]
        assert step.num_decodes == len(self._decoding), "the decode batches differ"
        cached = step.cached_reqs
        listed = [
            (req, n)
            for req, n in zip(cached.reqs, cached.num_scheduled_tokens, strict=True)
            if req not in self._decoding
        ]
        for new in step.new_reqs:
            known = len(new.prompt_token_ids) + len(new.output_token_ids)
            self._behind[new.req] = known - new.num_computed_tokens
            listed.append((new.req, new.num_scheduled_tokens))
        for req, n in listed:
            self._behind[req] -= n
            if self._behind[req] == 0:
                self._decoding.add(req)
        num_joined = len(self._decoding) - step.num_decodes
        tokens = token_ids([TOKEN]) * (step.num_decodes + num_joined)
        return ModelRunnerOutput(step.epoch, step.step_id, tokens)
