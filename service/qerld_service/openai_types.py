"""The part of OpenAI's completion API that this server speaks. Any other field is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qerld_service.engine_types import MAX_STOP_STRING, MAX_STOPS, Delta, Sampling

NonEmpty = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING)]


class _Closed(BaseModel):
    """Its lists stop at their first problem (`fail_fast`): they could have a million, and listing them takes long."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Closed):
    include_usage: bool = False


class TextPart(_Closed):
    """Content may come in parts; text is the only kind."""

    type: Literal["text"]
    text: str


class ChatMessage(_Closed):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Common(_Closed):
    """Fields of both routes. Those with one allowed value are what many clients always send."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_p: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None

    def sampling(self, limit: int) -> Sampling:
        """For the engine; `limit` where the client gives none."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            n=self.n,
            temperature=self.temperature,
            max_tokens=self.token_limit or limit,
            seed=self.seed,
            stop=tuple(stop),
        )

    @property
    def token_limit(self) -> int | None:
        raise NotImplementedError

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Common):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Common):
    """POST /v1/completions. `logprobs` gives the sampled tokens' own, not those of alternatives."""

    prompt: NonEmpty | Annotated[list[int], Field(min_length=1, fail_fast=True)]
    max_tokens: int = Field(16, ge=1)
    logprobs: Literal[0] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class ChatForm:
    """How a chat is answered."""

    method = "chat.completions"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    @staticmethod
    def opening(index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    @staticmethod
    def part(delta: Delta, logprobs: list[tuple[str, float]] | None) -> dict[str, Any]:
        return _choice(delta, "delta", {"content": delta.text}, ChatForm._logprobs(logprobs))

    @staticmethod
    def choice(delta: Delta, logprobs: list[tuple[str, float]] | None) -> dict[str, Any]:
        return _choice(delta, "message", {"role": "assistant", "content": delta.text}, ChatForm._logprobs(logprobs))

    @staticmethod
    def _logprobs(logprobs: list[tuple[str, float]] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        rows: list[dict[str, Any]] = [
            {"token": token, "logprob": value, "bytes": None, "top_logprobs": []} for token, value in logprobs
        ]
        return {"content": rows}


class TextForm:
    """How a plain prompt is answered."""

    method = "completions"
    whole = chunk = "text_completion"
    id_prefix = "cmpl"

    @staticmethod
    def opening(index: int) -> dict[str, Any] | None:
        return None

    @staticmethod
    def part(delta: Delta, logprobs: list[tuple[str, float]] | None) -> dict[str, Any]:
        if logprobs is None:
            return _choice(delta, "text", delta.text, None)
        tokens, values = [token for token, _ in logprobs], [value for _, value in logprobs]
        return _choice(delta, "text", delta.text, {"tokens": tokens, "token_logprobs": values})

    choice = part


def _choice(delta: Delta, name: str, content: Any, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": delta.index, name: content, "logprobs": logprobs, "finish_reason": delta.finish_reason}
