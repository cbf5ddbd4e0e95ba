"""A prediction as text, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limelight.pytorch.builds import cudnn_spelled, spelled
from limelight.pytorch.prediction import Prediction, describe
from limelight.pytorch.rule import Verdict
from limelight.tables import head_lines, new_table, note_lines, plain_text, reason_lines

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_COLOURS = {Verdict.CHOSEN: "bold green", Verdict.NO_CODE: "bold red"}


def prediction_head(prediction: Prediction) -> Text:
    """The verdict, the build, the device and the call."""
    s = prediction.situation
    cuda = f"cuDNN {cudnn_spelled(s.build.cudnn)}, CUDA {spelled(s.build.cuda)}"
    with_cuda = f"{s.build} with {cuda}" if s.build.architectures else f"{s.build} without CUDA"
    words = describe(s.sdpa) | {"build": f"{with_cuda} ({s.build.source})"}
    words["order"] = f"{', '.join(prediction.order)} ({prediction.order_source})"
    good = prediction.raises is None and prediction.has_code
    verdict = f"PyTorch runs {prediction.backend}"
    if prediction.raises is not None:
        verdict = f"PyTorch raises an error: {prediction.raises}"
    elif not prediction.has_code:
        verdict = f"PyTorch selects {prediction.backend}, and fails"
    return head_lines(verdict, good, str(s.device), words)


def prediction_table(prediction: Prediction) -> Table:
    """A row for each of PyTorch's backends, in the order in which it tries them."""
    table = new_table("PyTorch's backend", "verdict", "why  [place in PyTorch's source]")
    for name, candidate in prediction.candidates.items():
        style = _COLOURS.get(candidate.verdict, "")
        table.add_row(name, str(candidate.verdict), reason_lines(candidate.reasons), style=style)
    return table


def prediction_notes(prediction: Prediction) -> list[Text]:
    return note_lines(prediction.notes)


def prediction_text(prediction: Prediction) -> str:
    """What `print(limelight.explain_torch(...))` shows."""
    parts = (prediction_head(prediction), prediction_table(prediction))
    return plain_text(*parts, *prediction_notes(prediction))
