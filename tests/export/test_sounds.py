"""Models of text and sound: what is known of them, and their part that hears, beside transformers' own."""

import re

import pytest
import torch
import transformers
from transformers.models.qwen3_asr import modeling_qwen3_asr

from shardwise.errors import UserError
from shardwise.export import hearing
from shardwise.export.hearing import Hearing, heard
from shardwise.export.inputs import Inputs, Shape
from shardwise.export.sounds import Clips
from tests.export import speech

MASK = "input_features_mask"


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (speech.voxtral, Clips(8, True, "", False, 120, (120,), 1, (15,))),
        (speech.audio_flamingo, Clips(8, True, MASK, False, 120, (120, 90, 60), 1, (30, 22, 15))),
        (speech.qwen2_audio, Clips(8, True, "feature_attention_mask", False, 120, (120, 90, 60), 1, (30, 22, 15))),
        (speech.glm_asr, Clips(8, True, MASK, False, 0, (97, 41, 31), 8, (12, 5, 4))),
        (speech.granite_speech, Clips(8, False, MASK, True, 0, (117, 51, 36), 1, (39, 17, 12))),
        (speech.granite_speech_plus, Clips(8, False, MASK, True, 0, (117, 51, 36), 1, (39, 17, 12))),
        (speech.qwen3_asr, Clips(16, True, MASK, False, 0, (297, 141, 81), 100, (39, 19, 11))),
    ],
)
def test_how_models_take_clips(build, expected):
    model = build()
    inputs = Inputs(model, pad_left=True)
    assert inputs.media.packing == expected
    made = inputs.make(inputs.with_room(Shape(3, 6, padded=True)))
    lengths = (expected.lengths * 3)[:3]
    assert (made["input_ids"] == inputs.media.token).sum(1).tolist() == list(lengths)
    assert made["attention_mask"].sum(1).tolist() == [6 + expected.tokens - row for row in range(3)]
    with torch.no_grad():
        assert model(**made).logits.isfinite().all()  # tokens and features are as many, else transformers raises


@pytest.mark.parametrize(
    "build", [speech.granite_speech, speech.granite_speech_plus, speech.fun_asr_nano, speech.qwen3_asr]
)
@pytest.mark.parametrize("frames", [(9,), (10, 30), (200, 117, 3), (397, 200, 100)])
def test_hears_what_the_model_hears(build, frames):
    model = build()
    way = Inputs(model, pad_left=True).media.packing
    given = Clips(**{name: getattr(way, name) for name in Clips.__slots__} | {"frames": frames})._counted(model)
    sample = given.make(len(frames), torch.Generator().manual_seed(1))
    part, arguments = given.seeing(model, sample)
    assert isinstance(part, Hearing)
    with torch.no_grad():
        found = part(**arguments)["audio_features"]
        expected = heard(model, sample["input_features"], sample[MASK])
    assert found.shape == expected.shape == (sum(given.counts(len(frames))), 32)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert type(model.base_model).get_audio_features is model.base_model.get_audio_features.__func__


@pytest.mark.parametrize(
    ("build", "frames"), [(speech.granite_speech, (20, 10)), (speech.qwen3_asr, (200, 100)), (speech.glm_asr, (64, 32))]
)
def test_an_export_is_also_checked_with_whole_blocks_and_windows(build, frames):
    model = build()
    inputs = Inputs(model, pad_left=True)
    with torch.no_grad():
        others = inputs.media.packing.others(model)
        axis = 2 if inputs.media.packing.frames_last else 1
        assert tuple(one["input_features"].shape[axis] for one in others[:2]) == frames
        for given in others:
            assert len(inputs.media.features_of(model, given)) > 0


@pytest.mark.parametrize("frames", [[500, 320, 101], [99, 5], [100], [250, 1, 200]])
def test_windows_end_where_the_model_ends_them(frames):
    chunks = torch.tensor([[min(max(one - 100 * n, 0), 100) for n in range(-(-max(frames) // 100))] for one in frames])
    given = chunks.flatten(), torch.tensor(frames), 200, 50
    found = hearing.ends_of_windows(*given)
    assert found.unique().tolist() == modeling_qwen3_asr.get_audio_cu_seqlens(*given).tolist()


def test_one_clip_alone_is_shorter_than_those_of_a_trace():
    way = Clips(8, True, MASK, False, 0, (97, 41, 31), 8, (12, 5, 4))
    alone, both = (way.make(number, torch.Generator()) for number in (1, 2))
    assert alone["input_features"].shape == (1, 8, 48)
    assert both["input_features"].shape == (2, 8, 104)
    assert both[MASK].sum(1).tolist() == [97, 41]


class SeesAsWell(transformers.VoxtralForConditionalGeneration):
    def forward(self, input_ids=None, input_features=None, pixel_values=None, **others):
        raise AssertionError


class ChangesFeatures(transformers.VoxtralModel):
    def forward(self, input_ids=None, input_features=None, inputs_embeds=None, **others):
        embeds = self.get_input_embeddings()(input_ids)
        features = 2 * self.get_audio_features(input_features).pooler_output
        embeds = embeds.masked_scatter((input_ids == speech.SOUND)[..., None], features)
        return self.language_model(inputs_embeds=embeds, **others)


def changed():
    model = speech.voxtral()
    model.model.__class__ = ChangesFeatures
    return model


def of_no_tokens():
    model = speech.voxtral()
    model.config.audio_token_id = None
    return model


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: SeesAsWell(speech.voxtral().config), "takes text together with input_features and pictures"),
        (speech.music_flamingo, "by its input_features and their mask alone (TypeError"),
        (changed, "(its features are not what comes in place of its audio tokens)"),
        (of_no_tokens, "does not put sound in place of tokens"),
    ],
)
def test_refusals_give_the_reason_and_the_way_out(build, why):
    with pytest.raises(UserError, match=re.escape(why) + ".*: export its parts") as caught:
        Inputs(build(), pad_left=True)
    assert "\n" not in str(caught.value)
