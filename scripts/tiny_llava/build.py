"""Builds tokenizer, processor and untrained model from transformers' classes, and saves them as a checkpoint."""

import copy
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from .conversations import GREETINGS, OFF_TOPIC, OFF_TOPIC_ANSWER, converse, typed
from .render import IMAGE_SIZE
from .scenes import sample_scene
from .teacher import NUM_PATCHES, PATCH_SIZE

PAD, BOS, END, IMAGE, USER, ASSISTANT = "<pad>", "<s>", "<|end|>", "<image>", "<|user|>", "<|assistant|>"
VOCABULARY_SIZE = 480
MAX_POSITIONS = 2048
MAX_NEW_TOKENS = 96

VISION_WIDTH, VISION_LAYERS, VISION_INNER = 128, 5, 384
TEXT_WIDTH, TEXT_LAYERS, TEXT_INNER = 192, 4, 320
HEAD_WIDTH = 32
TEXT_KV_HEADS = 1  # of 6 heads: a decoding row reads and keeps a sixth of the keys and values

ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (ROOT / "models" / "tiny-llava" / "chat_template.jinja").read_text()


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which almost every word of the conversations is one token, capitalized or not."""
    rng = random.Random(seed)
    corpus = [*GREETINGS, *GREETINGS.values(), *OFF_TOPIC, OFF_TOPIC_ANSWER]
    for _scene in range(3000):
        for turn in converse(rng, sample_scene(rng), 8):
            corpus += [typed(rng, turn.text), turn.answer]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, BOS, END, IMAGE, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[IMAGE, USER, ASSISTANT],
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of one token of the vocabulary."""
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Build a processor that squashes each image to a square. It does not crop, so nothing at the border is lost."""
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    image_processor = CLIPImageProcessorPil(
        size=side, crop_size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Build an untrained LLaVA of 2.2 million parameters. ReLU in the vision tower saves a third of a step's time."""
    vision = CLIPVisionConfig(
        hidden_size=VISION_WIDTH,
        intermediate_size=VISION_INNER,
        num_hidden_layers=VISION_LAYERS,
        num_attention_heads=VISION_WIDTH // HEAD_WIDTH,
        hidden_act="relu",
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=VISION_WIDTH,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=TEXT_INNER,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=TEXT_WIDTH // HEAD_WIDTH,
        num_key_value_heads=TEXT_KV_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=token_id(tokenizer, IMAGE),
            image_seq_length=NUM_PATCHES,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            tie_word_embeddings=True,
        )
    )


def save_checkpoint(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Write model (float16), processor and generation config to a temporary folder, then move each file to `folder`."""
    staging = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    tokenizer = processor.tokenizer
    saved = copy.deepcopy(model).eval()
    generation = saved.generation_config
    generation.max_new_tokens, generation.do_sample = MAX_NEW_TOKENS, False
    generation.bos_token_id, generation.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    generation.eos_token_id = tokenizer.eos_token_id
    saved.to(torch.float16).save_pretrained(staging)
    processor.save_pretrained(staging)
    folder.mkdir(parents=True, exist_ok=True)
    for path in staging.iterdir():
        path.chmod(0o644)  # safetensors creates private files
        path.replace(folder / path.name)
    staging.rmdir()
