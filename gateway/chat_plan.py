"""From a chat to what the model is given, what it is held to, and how its answer is read. Pure.

Owns the rules of tools: which choices a model can honour, by its chat template and the settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.errors import invalid
from gateway.grammars import AskedGrammar, grammar_of
from gateway.openai import ChatBody
from gateway.openai.tools import NamedChoice, Tool
from gateway.tools.forced import described, named_call, required_calls
from gateway.tools.parsers import family_of
from gateway.tools.reasoning import OPENING
from gateway.tools.speech import FORCED, Speech
from wire.config import Settings
from wire.grammars import GrammarError


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What one chat becomes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None  # for the template
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    grammar: AskedGrammar | None = None
    speech: Speech = field(default_factory=Speech)


def plan_chat(body: ChatBody, template: str, settings: Settings) -> ChatPlan:
    """Decide all that does not need the tokens. Raises ApiError for what cannot be done."""
    plan = ChatPlan(
        [message.for_template() for message in body.messages],
        template_kwargs=_template_kwargs(body, template),
        grammar=grammar_of(body),
        speech=Speech(
            parallel_calls=body.parallel_tool_calls, shows_reasoning=body.include_reasoning
        ),
    )
    if body.tools is None or not body.chooses_tools:
        return plan
    if body.tool_choice in (None, "auto"):
        return _auto(plan, body.tools, template, settings)
    return _forced(plan, body, body.tools, template)


def with_reasoning(plan: ChatPlan, prompt_end: str, settings: Settings) -> Speech:
    """How the answer is read, now that it is known how the prompt ends.

    An output that is held to a grammar holds no reasoning.
    """
    if settings.reasoning_parser == "none" or plan.grammar is not None:
        return plan.speech
    is_open = prompt_end.rstrip().endswith(OPENING)
    return replace(plan.speech, reasoning="open" if is_open else "closed")


def _auto(plan: ChatPlan, tools: Sequence[Tool], template: str, settings: Settings) -> ChatPlan:
    family: str | None = settings.tool_call_parser
    if family == "auto":
        family = family_of(template)
    if "tools" not in template or family in (None, "none"):
        raise invalid(
            "tool_choice: this model is not known to call tools by itself (its chat template has "
            "none, or none of a known form; see TOOL_CALL_PARSER); `required`, `none` or a named "
            "function can be chosen",
            "tool_choice",
        )
    return replace(
        plan, tools=_for_template(tools), speech=replace(plan.speech, tool_parser=family)
    )


def _forced(plan: ChatPlan, body: ChatBody, tools: Sequence[Tool], template: str) -> ChatPlan:
    named = None
    if isinstance(body.tool_choice, NamedChoice):
        named = body.tool_choice.function.name
    try:
        if named is None:
            grammar = required_calls(tools, parallel=body.parallel_tool_calls)
        else:
            grammar = named_call(tools, named)
    except GrammarError as error:
        raise invalid(f"tools: {error}", "tools", code="invalid_grammar") from None
    plan = replace(
        plan,
        grammar=AskedGrammar(grammar, "tools"),
        speech=replace(plan.speech, tool_parser=FORCED, named_call=named),
    )
    if "tools" in template:
        return replace(plan, tools=_for_template(tools))
    return replace(plan, messages=described(plan.messages, tools, named))


def _for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _template_kwargs(body: ChatBody, template: str) -> dict[str, Any]:
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    if "reasoning_effort" not in template:
        raise invalid(
            "reasoning_effort: this model's chat template knows no such thing", "reasoning_effort"
        )
    return {"reasoning_effort": body.reasoning_effort, **body.chat_template_kwargs}
