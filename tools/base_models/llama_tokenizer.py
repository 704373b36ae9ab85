"""Trains small tokenizers in Llama's format, for base models that are made from nothing.

As `qwen_tokenizer`, for families whose text tower is a Llama or a Mistral: BPE over characters with
a byte as the last resort, a space before every text, words marked by U+2581.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers, processors

from tools.base_models import byte_fallback_bpe
from uirl_jax.families import idefics2, llava
from uirl_jax.families.border import ChatLayout


@dataclasses.dataclass(frozen=True)
class LlamaTokenizer:
    """The tokenizer of one family.

    Attributes:
      special_tokens: in the order of their ids here; in published ones those of images come last.
      chat: layout of the family, for the chat template.
      processor_class: in transformers.
      legacy: says in tokenizer_config.json that texts behind special tokens begin with a space too,
        as tokenizer.json has it; transformers 5 makes the first text's alone where it is not said.
    """

    special_tokens: tuple[str, ...]
    chat: ChatLayout
    processor_class: str
    legacy: bool = False

    def train_tokenizer(self, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Trains BPE with byte fallback on texts; the same texts give the same tokenizer.

        Args:
          texts: what the model will read and write, each without special tokens.
          vocab_size: upper bound of the number of ids, the special tokens included.

        Returns:
          A tokenizer whose ids are the special tokens, then the 256 bytes, then characters and
          merges.

        Raises:
          ValueError: vocab_size leaves no room for bytes and special tokens.
        """
        space = byte_fallback_bpe.SPACE
        trained = byte_fallback_bpe.train(
            texts,
            vocab_size,
            self.special_tokens,
            normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)]),
        )
        trained.decoder = decoders.Sequence(
            [
                decoders.Replace(space, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trained.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", trained.token_to_id("<s>"))]
        )
        return trained

    def save(self, tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
        """Writes the files of a Hugging Face model directory. See qwen_tokenizer.save."""
        config = {
            "bos_token": "<s>",
            "clean_up_tokenization_spaces": False,
            "eos_token": self.chat.end_tokens[0],
            "image_token": self.chat.image_token,
            **({"legacy": True} if self.legacy else {}),
            "model_max_length": 4096,
            "pad_token": "<pad>",
            "padding_side": "left",
            "processor_class": self.processor_class,
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
        }
        template = self.chat.template(system_prompt)
        byte_fallback_bpe.write(tokenizer, directory, config, template)


LLAVA = LlamaTokenizer(
    ("<unk>", "<s>", "</s>", "<image>", "<pad>"),
    llava.FAMILY.chat,
    "LlavaProcessor",
    legacy=True,  # ids of LLaVA-1.5's training, which encoded the texts around <image> one by one
)
IDEFICS2 = LlamaTokenizer(
    (
        *("<unk>", "<s>", "</s>", "<pad>"),
        *("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
    ),
    idefics2.FAMILY.chat,
    "Idefics2Processor",
)
