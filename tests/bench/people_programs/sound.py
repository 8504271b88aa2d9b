"""Models of `transformers` that hear, speak, or forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from people_programs.language import BATCH, VOCABULARY, pretrained
from people_programs.made import Made, Program, add, trained
from people_programs.seq2seq import ENDS

WAVES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "mask_time_min_masks": 1,
    "pad_token_id": 0,
}


def wave(samples: int = 640) -> Tensor:
    return torch.randn(BATCH, samples)


def takes(name: str, make: Callable[[], Made]) -> None:
    add(name, Program("sound", make, "transformers"))


def spelled(kind: str, **config: Any) -> Callable[[], Made]:
    """Letters from a wave, by connectionist temporal classification."""

    def make() -> Made:
        model = pretrained(kind, ctc_zero_infinity=True, **WAVES | config)
        return trained(model, input_values=wave(), labels=torch.randint(1, 32, (BATCH, 5)))

    return make


def classed(kind: str, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        model = pretrained(kind, num_labels=3, classifier_proj_size=16, **WAVES | config)
        return trained(model, input_values=wave(), labels=torch.randint(3, (BATCH,)))

    return make


def _spectrogram() -> Made:
    model = pretrained(
        "ASTForAudioClassification",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_length=32,
        num_mel_bins=16,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        num_labels=3,
    )
    return trained(model, input_values=torch.randn(BATCH, 32, 16), labels=torch.randint(3, (BATCH,)))


def _whisper_classes() -> Made:
    model = pretrained(
        "WhisperForAudioClassification",
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        max_source_positions=16,
        num_mel_bins=8,
        num_labels=3,
        classifier_proj_size=16,
        use_weighted_layer_sum=True,
        **ENDS,
    )
    return trained(model, input_features=torch.randn(BATCH, 8, 32), labels=torch.randint(3, (BATCH,)))


def _speech_to_text() -> Made:
    model = pretrained(
        "Speech2TextForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=64,
        max_target_positions=32,
        **ENDS,
    )
    return trained(model, input_features=torch.randn(BATCH, 32, 8), labels=torch.randint(3, VOCABULARY, (BATCH, 6)))


def _speaks() -> Made:
    layers = {
        "hidden_size": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    more = {
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "speech_decoder_prenet_units": 16,
        "speech_decoder_postnet_units": 16,
        "speaker_embedding_dim": 8,
        "reduction_factor": 1,
    }
    model = pretrained(
        "SpeechT5ForTextToSpeech", vocab_size=VOCABULARY, use_guided_attention_loss=False, **layers, **more
    )
    return trained(
        model,
        input_ids=torch.randint(3, VOCABULARY, (BATCH, 7)),
        speaker_embeddings=torch.randn(BATCH, 8),
        labels=torch.randn(BATCH, 10, 8),
    )


def _encodec() -> Made:
    model = pretrained(
        "EncodecModel",
        num_filters=4,
        upsampling_ratios=[4, 2],
        hidden_size=16,
        codebook_size=16,
        codebook_dim=16,
        num_lstm_layers=1,
        target_bandwidths=[24.0],
        sampling_rate=24000,
        num_residual_layers=1,
    )
    return trained(model, torch.randn(BATCH, 1, 320))


def _codec() -> Made:
    model = pretrained(
        "DacModel",
        encoder_hidden_size=8,
        downsampling_ratios=[2, 2],
        decoder_hidden_size=16,
        upsampling_ratios=[2, 2],
        n_codebooks=2,
        codebook_size=16,
        codebook_dim=4,
        hidden_size=32,
    )
    return trained(model, torch.randn(BATCH, 1, 160))


def _vocoder() -> Made:
    model = pretrained(
        "SpeechT5HifiGan",
        model_in_dim=8,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
    )
    return trained(model, torch.randn(BATCH, 10, 8))


def _series(kind: str, **config: Any) -> Callable[[], Made]:
    small = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }

    def make() -> Made:
        model = pretrained(
            kind, prediction_length=4, context_length=10, lags_sequence=[1, 2], num_time_features=1, **small, **config
        )
        past, future = torch.rand(BATCH, 12), torch.rand(BATCH, 4)
        return trained(
            model,
            past_values=past,
            past_time_features=torch.rand(BATCH, 12, 1),
            past_observed_mask=torch.ones(BATCH, 12),
            future_values=future,
            future_time_features=torch.rand(BATCH, 4, 1),
        )

    return make


def _patches() -> Made:
    model = pretrained(
        "PatchTSTForPrediction",
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        prediction_length=4,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
    )
    return trained(model, past_values=torch.rand(BATCH, 16, 2), future_values=torch.rand(BATCH, 4, 2))


def _mixer() -> Made:
    model = pretrained(
        "PatchTSMixerForPrediction",
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        prediction_length=4,
        d_model=16,
        num_layers=2,
    )
    return trained(model, past_values=torch.rand(BATCH, 16, 2), future_values=torch.rand(BATCH, 4, 2))


def _decides() -> Made:
    model = pretrained(
        "DecisionTransformerModel", state_dim=5, act_dim=2, hidden_size=32, n_layer=1, n_head=4, max_ep_len=20
    )
    steps = torch.arange(6).expand(BATCH, 6)
    return trained(
        model,
        states=torch.randn(BATCH, 6, 5),
        actions=torch.randn(BATCH, 6, 2),
        rewards=torch.randn(BATCH, 6, 1),
        returns_to_go=torch.randn(BATCH, 6, 1),
        timesteps=steps,
        attention_mask=torch.ones(BATCH, 6),
    )


takes("wav2vec2", spelled("Wav2Vec2ForCTC"))
takes("wav2vec2 with layer norms", spelled("Wav2Vec2ForCTC", feat_extract_norm="layer", do_stable_layer_norm=True))
takes("hubert", spelled("HubertForCTC"))
takes("wavlm", spelled("WavLMForCTC", num_buckets=8, max_bucket_distance=16))
takes("sew", spelled("SEWForCTC", squeeze_factor=2))
takes("unispeech sat", classed("UniSpeechSatForSequenceClassification"))
takes(
    "wav2vec2 conformer",
    spelled(
        "Wav2Vec2ConformerForCTC",
        position_embeddings_type="relative",
        conv_depthwise_kernel_size=3,
        max_source_positions=64,
    ),
)
takes("audio spectrogram transformer", _spectrogram)
takes("whisper that classifies", _whisper_classes)
takes("speech to text", _speech_to_text)
takes("speecht5", _speaks)
takes("encodec", _encodec)
takes("dac", _codec)
takes("hifi gan", _vocoder)
takes("time series transformer", _series("TimeSeriesTransformerForPrediction"))
takes("informer", _series("InformerForPrediction"))
takes("patchtst", _patches)
takes("patch mixer", _mixer)
takes("decision transformer", _decides)
