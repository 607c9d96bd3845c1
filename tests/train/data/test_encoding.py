from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.data.documents import Document
from shardwise.train.data.encoding import encode_document
from shardwise.train.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

MESSAGES = (
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }};{% endgeneration %}"
    "{% else %}{{ m.content }};{% endif %}"
    "{% endfor %}"
)
FORGETFUL = "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }};{% endfor %}"

WithTemplate = Callable[[str], HuggingFaceTokenizer]


@pytest.fixture
def with_template(tmp_path: Path) -> WithTemplate:
    from transformers import AutoTokenizer

    ByteTokenizer().save(tmp_path)

    def load(template: str) -> HuggingFaceTokenizer:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        tokenizer.chat_template = template
        return HuggingFaceTokenizer(tokenizer, str(tmp_path))

    return load


def learnt(document: Document, tokenizer: Tokenizer) -> str:
    """Return the targets as text: one "_" for adjacent tokens that are no targets, "$" for the end of a document."""
    encoded = encode_document(document, tokenizer)
    marked = ""
    for token, is_target in zip(encoded.ids.tolist(), encoded.is_target.tolist(), strict=True):
        if is_target:
            marked += "$" if token == tokenizer.end_id else chr(token)
        elif not marked.endswith("_"):
            marked += "_"
    return marked


def test_plain_text_is_learnt_but_for_its_first_token() -> None:
    assert learnt(Document.of_text("a", "hello"), ByteTokenizer()) == "_ello$"


def test_the_prompt_is_masked() -> None:
    assert learnt(Document.of_prompt("a", "question", "answer"), ByteTokenizer()) == "_answer$"


def test_a_conversation_without_a_template() -> None:
    document = Document.of_messages("a", MESSAGES)
    assert learnt(document, ByteTokenizer()) == "_2$_yes$"
    text = ByteTokenizer().decode(encode_document(document, ByteTokenizer()).ids.tolist())
    assert text == "### user\n1+1?\n\n### assistant\n2### user\nsure?\n\n### assistant\nyes"


def test_a_prompt_has_the_tokens_that_generation_gives_it(tmp_path: Path) -> None:
    """Generation tokenizes a prompt as one text, in which the end of the question has other tokens than alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pipeline.train_from_iterator(["yes?\n\n"], trainer)  # a token of two line ends
    inner = PreTrainedTokenizerFast(tokenizer_object=pipeline, eos_token="<end>")
    assert inner.tokenize("1?\n\n")[-1] not in inner.tokenize("1?\n\n###")
    tokenizer = HuggingFaceTokenizer(inner, str(tmp_path))
    encoded = encode_document(Document.of_messages("a", MESSAGES[:2]), tokenizer)
    prompt = encoded.ids[: encoded.is_target.argmax()].tolist()
    assert prompt == inner("### user\n1+1?\n\n### assistant\n", add_special_tokens=False).input_ids


def test_a_template_of_the_tokenizer(with_template: WithTemplate) -> None:
    tokenizer = with_template(TEMPLATE)
    document = Document.of_messages("a", MESSAGES)
    assert learnt(document, tokenizer) == "_2;_yes;_"
    text = tokenizer.decode(encode_document(document, tokenizer).ids.tolist())
    assert text == "<user>1+1?;<assistant>2;<user>sure?;<assistant>yes;"


def test_a_template_that_marks_its_replies(with_template: WithTemplate) -> None:
    assert learnt(Document.of_messages("a", MESSAGES), with_template(MARKED)) == "_2;_yes;_"


def test_a_template_that_rewrites_earlier_turns_is_refused(with_template: WithTemplate) -> None:
    with pytest.raises(ConfigError, match=r"chats:7: the chat template rewrites earlier turns.*generation"):
        encode_document(Document.of_messages("chats:7", MESSAGES), with_template(FORGETFUL))


def test_a_template_that_raises(with_template: WithTemplate) -> None:
    with pytest.raises(ConfigError, match=r"chats:7.*no system prompts here"):
        encode_document(
            Document.of_messages("chats:7", MESSAGES), with_template("{{ raise_exception('no system prompts here') }}")
        )
