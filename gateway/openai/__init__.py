"""What clients may ask: the request bodies of the OpenAI endpoints, with vLLM's further options.

These models are the one truth about requests. Strict: a bool is no number, a string is no number, a
number is finite and an integer has 64 bits at most. `null` means "not given". A field that would
change the answer and cannot be honoured is refused by name; a field nobody knows is ignored, and
named in a debug log. Otherwise pure.
"""

from gateway.openai.body import Body, ModelBody, parse, unknown_fields
from gateway.openai.chat import ChatBody, Message
from gateway.openai.completion import CompletionBody
from gateway.openai.generation import GenerationBody
from gateway.openai.responses import ResponsesBody, in_words_of_responses
from gateway.openai.structured import StructuredOutputs
from gateway.openai.tokens import DetokenizeBody, TokenizeBody

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationBody",
    "Message",
    "ModelBody",
    "ResponsesBody",
    "StructuredOutputs",
    "TokenizeBody",
    "in_words_of_responses",
    "parse",
    "unknown_fields",
]
