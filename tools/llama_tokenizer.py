"""Trains small tokenizers in Llama's format, for base models that are made from nothing.

As `qwen_tokenizer`, for families whose text tower is a Llama or a Mistral: BPE over characters with
a byte as the last resort, a space before every text, words marked by U+2581.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from uirl_jax.families import idefics2, llava
from uirl_jax.families.border import ChatLayout

_SPACE = "\u2581"
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


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
        least = len(self.special_tokens) + len(_BYTES)  # no character, no merge
        if vocab_size < least:
            raise ValueError(f"vocab_size={vocab_size}, expected at least {least}")
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
        # Only while it is trained: Llama's merges cross no word and no digit, because none was
        # learnt that does, and its published tokenizer.json has no pre-tokenizer.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(_SPACE, behavior="merged_with_next"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.Punctuation(),
            ]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace(_SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        special = [
            AddedToken(token, special=True, normalized=False) for token in self.special_tokens
        ]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[*special, *_BYTES], show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        spec = json.loads(tokenizer.to_str())
        # The bytes have ids like any piece: "<0x41>" in a text is six characters.
        spec["added_tokens"] = [
            token for token in spec["added_tokens"] if token["content"] in self.special_tokens
        ]
        spec["pre_tokenizer"] = None
        trained = Tokenizer.from_str(json.dumps(spec))
        trained.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", trained.token_to_id("<s>"))]
        )
        return trained

    def save(self, tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
        """Writes the files of a Hugging Face model directory. See qwen_tokenizer.save."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        template = self.chat.template(system_prompt)
        config = {
            "bos_token": "<s>",
            "chat_template": template,
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
        tokenizer.save(str(directory / "tokenizer.json"))
        _write(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        # Processors of transformers read this file, older tokenizers the key of the config above.
        _write(directory / "chat_template.jinja", template)


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


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
