"""What goes over the wire, as the OpenAPI page shows it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_TEXT = "win a free prize now"
SessionKey = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""A key of the source, such as the id of a conversation."""


class _Given(BaseModel):
    """What a client sends; a key that is not known is an error, not silence."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=False)


class TextInput(_Given):
    """A text, or with `text_pair` a pair of texts."""

    text: str
    text_pair: str | None = None


class ImageInput(_Given):
    """An image: its file as base64, or as a data URL."""

    image: str


Input = str | TextInput | ImageInput


class Options(_Given):
    """How inputs are to be answered."""

    task: str | None = Field(default=None, description="The task, if given: routing is skipped.")
    tasks: list[str] | None = Field(
        default=None, min_length=1, max_length=1000, description="Choose among these tasks only."
    )
    top_k: int = Field(default=3, ge=1, le=1000, description="How many labels to return, the best included.")
    route: Literal["input", "batch"] = Field(
        default="input", description="Decide for each input, or once for all inputs of this request."
    )
    session: SessionKey | None = Field(
        default=None,
        description="A key of the source: inputs of recent requests with the same key count in the choice of the task.",
    )
    explain: bool = Field(default=False, description="Include an explanation: residuals, weights, heads, timings.")


class PredictRequest(Options):
    """One input or several."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": _TEXT},
                {"inputs": [_TEXT, {"text": "the team scored a late goal"}], "top_k": 1, "explain": True},
                {"inputs": {"image": "data:image/png;base64,iVBORw0KGgo="}, "tasks": ["digits", "cars"]},
            ]
        }
    )
    inputs: Input | list[Input] = Field(description="A text, `{text}`, `{image}`, or a list of these.")


class TextPart(BaseModel):
    """A part of a message; of other types than `text` nothing is read."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a conversation, as OpenAI's clients send it."""

    role: str = Field(max_length=64)
    content: str | list[TextPart] | None = None

    @property
    def words(self) -> str:
        """The text of all its parts."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if part.type == "text" and part.text)
        return self.content or ""


class RouteRequest(_Given):
    """Inputs of which only the tasks are asked, or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": _TEXT}, {"messages": [{"role": "user", "content": "Is this spam? " + _TEXT}]}]
        }
    )
    inputs: Input | list[Input] | None = Field(default=None, description="As in `/v1/predict`.")
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=10_000, description="A conversation, in place of inputs."
    )
    tasks: list[str] | None = Field(
        default=None, min_length=1, max_length=1000, description="Choose among these tasks only."
    )
    top_k: int = Field(default=3, ge=1, le=1000, description="How many tasks to return, the best included.")
    session: SessionKey | None = Field(default=None, description="As in `/v1/predict`: a key of the source.")


class HuggingFaceParameters(_Given):
    """Parameters of text and image classification."""

    top_k: int | None = Field(default=None, ge=1, le=1000)
    function_to_apply: Literal["softmax"] | None = Field(default=None, description="Scores are those of a softmax.")
    task: str | None = None
    tasks: list[str] | None = Field(default=None, min_length=1, max_length=1000)


class HuggingFaceRequest(_Given):
    """Text or image classification as Hugging Face's inference services take it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": _TEXT}, {"inputs": [_TEXT], "parameters": {"top_k": 2}}]}
    )
    inputs: str | list[str] = Field(description="A text, or an image as base64; or a list of them.")
    parameters: HuggingFaceParameters | None = None
    options: dict[str, Any] | None = Field(default=None, description="Options of the hosted service; ignored here.")


class Error(BaseModel):
    """What was wrong: a code for programs and a sentence for people."""

    code: str = Field(examples=["too_large"])
    message: str = Field(examples=["The body has more than 20,000,000 bytes."])


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: Error


class LabelScore(BaseModel):
    """A label and its probability: among the labels of its head, or of a multi-label head by itself."""

    label: str
    score: float | None = Field(description="Null for a number.")
    value: float | None = Field(description="The number, for a regression head.")


class TaskLabelScore(LabelScore):
    """A label of a task."""

    task: str


class HuggingFaceLabel(BaseModel):
    """A label of a task as Hugging Face's inference services give it; of a regression head the score is its number."""

    task: str
    label: str
    score: float


class ExplanationAnswer(BaseModel):
    """Why an input was answered as it was."""

    residuals: dict[str, float] = Field(description="What remains of the activation, by task; the lowest is the best.")
    weights: dict[str, float]
    probabilities: dict[str, float] = Field(description="How probable it is that each task is the right one.")
    margin: float | None = Field(description="How far the best task is ahead, in standard deviations over the tasks.")
    lift: float | None = Field(description="How much more of the activation the best task holds than chance would.")
    agreement: float | None = Field(description="How far the voters agree on the best task, from 0 to 1.")
    confidences: dict[str, float] = Field(
        description="Where candidates answered an unclear input: how sure the head of each was; else empty."
    )
    typicality: float | None = Field(description="Share of the tasks' own inputs that is less typical; if calibrated.")
    site: str
    heads: dict[str, list[LabelScore]] = Field(description="The best labels of each task of the selected set.")
    timings: dict[str, float] = Field(description="Milliseconds per step of its batch, and its wait.")
    batch_size: int


class HeadAnswer(BaseModel):
    """The answer of a further head of the task."""

    label: str | None
    confidence: float | None
    score: float | None
    labels: list[str] | None
    scores: list[float] | None
    value: float | None


class PredictionAnswer(BaseModel):
    """The answer to one input; `task` is null where no task fits, or where there is an error."""

    task: str | None
    label: str | None
    confidence: float | None = Field(description="The probability that task and label are both right.")
    score: float | None = Field(description="The probability that the task's own head gives the label.")
    labels: list[str] | None = Field(
        description="For a multi-label task, every label with a probability above 0.5, the most probable first; else null."
    )
    scores: list[float] | None = Field(description="The probabilities of `labels`.")
    value: float | None = Field(description="For a regression task, its number; else null.")
    heads: dict[str, HeadAnswer] = Field(description="The answers of the task's further heads, by name.")
    alternatives: list[TaskLabelScore]
    selected: list[str]
    truncated: bool = Field(description="Whether the end of the text was cut off because it has too many tokens.")
    error: Error | None
    explain: ExplanationAnswer | None


class PredictAnswer(BaseModel):
    """The answers, in the order of the inputs."""

    request_id: str
    model: str
    predictions: list[PredictionAnswer]


class TaskConfidence(BaseModel):
    """A task, and how probable it is that it is the right one."""

    task: str
    confidence: float


class RouteEntry(BaseModel):
    """The task of one input; null where none fits, or where there is an error."""

    task: str | None
    confidence: float | None = Field(description="The probability that the task is right.")
    alternatives: list[TaskConfidence] = Field(description="The next best tasks.")
    selected: list[str]
    truncated: bool = Field(description="Whether the end of the text was cut off because it has too many tokens.")
    error: Error | None


class RouteAnswer(BaseModel):
    """The tasks, in the order of the inputs."""

    request_id: str
    model: str
    routes: list[RouteEntry]


class TaskAnswer(BaseModel):
    """A task of the bundle."""

    name: str
    labels: list[str] | None
    problem_type: str | None = Field(description="What the head's outputs mean, in Hugging Face's words.")
    bytes: int
    form: str
    rank: list[int] = Field(description="The lowest and the highest rank of its factors.")
    energy: float


class TasksAnswer(BaseModel):
    """The tasks, in order."""

    model: str
    tasks: list[TaskAnswer]


class BundleAnswer(BaseModel):
    """What the bundle holds."""

    name: str
    kind: Literal["text", "image"]
    answers: Literal["labels", "text", "tasks"] = Field(description="What inputs are answered with.")
    chat: bool = Field(description="Whether the base has a chat template, which makes prompts of conversations.")
    base: dict[str, Any]
    tasks: list[TaskAnswer]
    sizes: dict[str, int]
    ratio: float
    similarity: list[list[float]] = Field(description="Cosines of the tasks' deltas, in the order of the tasks.")
    overlap: list[list[float]] | None = Field(
        description="Share of the smaller of two tasks' routing subspaces that lies in the other, the mean over sites."
    )
    overlap_by_chance: float | None = Field(description="What random subspaces of their sizes share.")
    examples: list[dict[str, str]]
    router: dict[str, Any]
    limits: dict[str, float]
    versions: dict[str, str]


class ModelEntry(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: Literal["text", "image"]
    tasks: list[str] = Field(description="Those that inputs are routed to; the task itself, where the model is one.")


class ModelsAnswer(BaseModel):
    """The models: the bundle, and where texts are written each of its tasks."""

    object: Literal["list"]
    data: list[ModelEntry]


class Minute(BaseModel):
    """What was answered in one minute."""

    minute: str
    tasks: dict[str, int]
    abstentions: int
    errors: int


class TrafficAnswer(BaseModel):
    """What was answered since the start, and minute by minute."""

    since: str
    seconds: float
    tasks: dict[str, int]
    abstentions: int
    errors: int
    recent: list[Minute]
    latency_ms: dict[str, float | None] = Field(description="Quantiles over the last thousand requests.")
    queue: dict[str, int]


class StateAnswer(BaseModel):
    """How the service is."""

    status: str


class ReloadAnswer(BaseModel):
    """The bundle that is served now."""

    model: str
    tasks: list[str]
    seconds: float
