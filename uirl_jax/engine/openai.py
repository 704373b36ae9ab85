"""An engine whose tokens come from an OpenAI-compatible server (vLLM): `engine.kind = "openai"`.

Stands where `engine.Engine` does, between the actor's episodes and whatever samples. A request goes
out as chat messages and screenshots; what comes back must say which tokens were read, which were
sampled and with what logprob, or it is refused: the learner trains on them. New adapters are
written to a directory that both sides see, and the server is told to load them. It does not start
a server or balance several; `server_calls` has time-outs and retries, `completions` the JSON.
"""

import asyncio
import collections
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from flax import nnx

from uirl_jax.engine import completions, requests
from uirl_jax.engine.pixels import PixelReader
from uirl_jax.engine.requests import EngineConfig, SampleRequest, SampleResult
from uirl_jax.engine.server_calls import ServerCalls
from uirl_jax.engine.weights import check_fits
from uirl_jax.errors import ConfigError, ContextError, EngineError
from uirl_jax.families.chat import Chat, Message, without_repeats
from uirl_jax.families.loading import PolicyModel, save_adapter
from uirl_jax.log_lines import key_values
from uirl_jax.models.weights import adapters_to_numpy

logger = logging.getLogger(__name__)

KEPT_ADAPTERS = 2  # at the server: the newest, and the one that requests under way began with
_CLOSE_S = 10.0  # for unloading, when the engine closes
_SURE = -1e-3  # nats; what a token that was made certain has at least


class _Policy(NamedTuple):
    lora: nnx.State
    version: int


class OpenAIEngine:
    """Samples from a server that holds the same base model. An async context manager.

    Every request is sampled by one policy, the newest when it went out. Adapters that change
    nothing are the base, and need no support for LoRA at the server.

    Args:
      model: only the values of its adapters are read.
      chat: of the model directory; tells what a server reads of a context (`Chat.as_read`).
      max_context: tokens that a context may have, once the server has tokenised it.
      max_patches: of a screenshot that the learner takes.

    Raises:
      ConfigError: the key's environment variable is missing.
    """

    def __init__(
        self,
        model: PolicyModel,
        chat: Chat,
        cfg: EngineConfig,
        *,
        max_context: int,
        max_patches: int,
    ) -> None:
        self._model, self._cfg = model, cfg
        self._max_context, self._vocab_size = max_context, model.cfg.vocab_size
        self._max_patches = max_patches
        vocabulary = chat.vocabulary(model.cfg.vocab_size)
        self._end_token_ids = [int(token_id) for token_id in vocabulary.end_token_ids]
        self._forbidden_ids = frozenset(int(token_id) for token_id in vocabulary.forbidden_ids)
        self._image_token_id, self._as_read = chat.image_token_id, chat.as_read
        self._calls = ServerCalls(cfg.openai)
        self._pixels = PixelReader(model.inputs)
        self._next_policy = _Policy(model.trainable, version=0)
        self._asked: _Policy | None = None  # the last that the server was asked to load
        self._loading: asyncio.Task[str] | None = None  # it; gives the name to sample from
        self._load_tasks: set[asyncio.Task[str]] = set()  # it, and older ones that go on
        self._loads = 0
        self._name = f"uirl-{uuid.uuid4().hex[:8]}"  # engines share servers and directories
        self._adapters: collections.deque[str] = collections.deque()  # the oldest first
        self._in_use: collections.Counter[str] = collections.Counter()  # requests by model name
        self._totals: collections.Counter[str] = collections.Counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._running = 0
        self._changed_s = time.perf_counter()  # when _running last became 0 or 1
        self._stack: AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        stack = AsyncExitStack()
        try:
            await stack.enter_async_context(self._calls)
            self._pixels.open()
            stack.callback(self._pixels.close)
            self._places = asyncio.Semaphore(self._cfg.openai.concurrency)
            self._load_lock = asyncio.Lock()
            self._changed_s = time.perf_counter()
            self._stack = stack
            await self.warm_up()
        except BaseException:
            self._stack = None
            await stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ---------------------------------------------------------------- what callers use

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Waits for one of `concurrency` places and for the newest policy; returns what the server
        sampled. Cancelling the caller closes the connection, which ends the work there.

        Raises:
          ConfigError: a limit is exceeded, or the server does not read what `chat` writes.
          ContextError: the server would misread this one context.
          EngineError: the server cannot be reached, or answers with something it must not.
          ImageError: the newest screenshot cannot be decoded.
          RuntimeError: the engine is not open.
        """
        requests.check_settings(request, self._cfg)
        if not request.messages:
            raise ValueError("a request without messages, and the server tokenises text")
        if self._stack is None:
            raise RuntimeError("sample() outside of `async with engine`")
        largest = max((screen.patches for screen in request.screens), default=0)
        if largest > self._max_patches:  # the server would take it, and the learner could not
            raise ConfigError(
                f"a screenshot of {largest} patches is larger than the learner takes, "
                f"{self._max_patches}: raise learner.batch.patch_lengths or lower max_pixels"
            )
        expected = self._as_read(request.context_ids)
        if len(expected) > self._max_context:
            raise ContextError(
                f"the server's tokenizer makes {len(expected)} tokens of a context of "
                f"{len(request.context_ids)}, and {self._max_context} are the limit"
            )
        if request.screens and request.screens[-1].screenshot:
            # The server cuts it itself. It would be blamed for a screenshot that cannot be decoded.
            await self._pixels.check(request.screens[-1])
        arrived_s = time.perf_counter()
        async with self._places:
            self._seconds["queue"] += time.perf_counter() - arrived_s
            self._totals["admitted"] += 1
            with self._under_way():
                policy, model = await self._newest_model()
                self._in_use[model] += 1
                try:
                    completion = await self._complete(request, model, self._biases())
                finally:
                    self._in_use[model] -= 1
        self._check_prompt(completion.prompt_ids, request.context_ids, expected)
        self._totals["requests"] += 1
        self._totals["tokens_sampled"] += len(completion.token_ids)
        same = np.array_equal(expected, request.context_ids)
        self._totals["contexts_read_otherwise"] += not same
        uncut = request.top_p == 1.0 and request.top_k == 0
        count = len(completion.token_ids)
        return SampleResult(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_version=policy.version,
            stopped=completion.stopped,
            full_logprobs=completion.logprobs if uncut else np.full(count, np.nan, np.float32),
            policy_versions=np.full(count, policy.version, np.int32),
            context_ids=None if same else expected,
        )

    def release(self, episode: str) -> None:
        """Nothing to do: the server's cache of prefixes knows no episodes."""

    def set_policy(self, trainable: nnx.State, version: int) -> None:
        """Takes new adapters into use: the next request has the server load them, and waits.

        Raises:
          PolicyError: they are not of the structure, shapes and dtypes of the first.
        """
        check_fits(trainable, self._next_policy.lora, version)
        self._next_policy = _Policy(trainable, version)

    async def warm_up(self) -> None:
        """Asks the server for its models and one token: there is nothing to compile, but much that
        may be wrong. Entering does it.

        Raises:
          ConfigError: the server does not have the model, takes shorter contexts, does not obey
            logit_bias, or gives logprobs of another distribution than it samples from.
          EngineError: as for sample.
        """
        await self._check_models()
        certain = next(
            token_id
            for token_id in range(self._vocab_size)
            if token_id not in self._forbidden_ids and token_id not in self._end_token_ids
        )
        probe = SampleRequest(
            context_ids=np.zeros(0, np.int32),
            screens=(),
            max_new_tokens=1,
            temperature=1.0,
            seed=0,
            messages=(Message("user", ("Hello",)),),
        )
        completion = await self._complete(
            probe, self._cfg.openai.model, {certain: -completions.NEVER}
        )
        if completion.token_ids[0] != certain or completion.logprobs[0] < _SURE:
            raise ConfigError(
                f"{self._cfg.openai.url}: a token with a logit bias of {-completions.NEVER:g} is "
                f"certain, and was sampled as {int(completion.token_ids[0])} (expected {certain}) "
                f"with a logprob of {completion.logprobs[0]:.4g} (expected 0): the server has to "
                "obey logit_bias and return logprobs of what it samples from "
                "(--logprobs-mode processed_logprobs)"
            )

    def metrics(self) -> dict[str, float]:
        """Totals since the start; the names that `engine.Engine` has mean the same here."""
        totals, seconds = self._totals, self._seconds
        since_s = time.perf_counter() - self._changed_s
        busy_s = seconds["busy"] + since_s * (self._running > 0)
        return {
            "engine/requests": totals["requests"],
            "engine/tokens_sampled": totals["tokens_sampled"],
            "engine/decode_tokens_per_s": totals["tokens_sampled"] / max(busy_s, 1e-9),
            "engine/images_read": self._pixels.screens,
            "engine/images_cpu_s": self._pixels.cpu_s,
            "engine/queue_s": seconds["queue"] / max(1, totals["admitted"]),
            "engine/busy_s": busy_s,
            "engine/idle_s": seconds["idle"] + since_s * (self._running == 0),
            "engine/retries": self._calls.retries,
            "engine/contexts_read_otherwise": totals["contexts_read_otherwise"],
            "engine/policies_loaded": self._loads,
            "engine/policy_load_s": seconds["load"],
        }

    async def close(self) -> None:
        """Unloads what was loaded, as far as the server lets us, and closes the connections.

        A request that is under way fails.
        """
        stack, self._stack = self._stack, None
        if stack is None:
            return
        async with stack:
            for task in self._load_tasks:
                task.cancel()
            await asyncio.gather(*self._load_tasks, return_exceptions=True)
            self._loading = self._asked = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._unload(keep=0)

    # ---------------------------------------------------------------- one completion

    async def _complete(
        self, request: SampleRequest, model: str, biases: dict[int, float]
    ) -> completions.Completion:
        body = completions.request_body(
            request, model, end_token_ids=self._end_token_ids, biases=biases
        )
        answer = await self._calls.json("POST", "chat/completions", body)
        try:
            return completions.read_completion(
                answer,
                request,
                vocab_size=self._vocab_size,
                end_token_ids=self._end_token_ids,
                forbidden_ids=self._forbidden_ids,
            )
        except ValueError as error:
            where = self._calls.where("POST", "chat/completions")
            raise EngineError(f"{where}, model {model}: {error}") from error

    def _biases(self) -> dict[int, float]:
        return dict.fromkeys(self._forbidden_ids, completions.NEVER)

    def _check_prompt(self, got: np.ndarray, meant: np.ndarray, expected: np.ndarray) -> None:
        """The server read the context, image placeholders expanded or one an image.

        Args:
          expected: `as_read` of meant.

        Raises: ConfigError that names the first difference, and what may be at fault.
        """
        image = self._image_token_id
        one_each = without_repeats(expected, image)
        if any(np.array_equal(got, ids) for ids in (expected, one_each, meant)):
            return
        expanded = np.count_nonzero(got == image) != np.count_nonzero(one_each == image)
        wanted = expected if expanded else one_each
        length = min(len(got), len(wanted))
        place = int(np.argmax(np.append(got[:length] != wanted[:length], True)))

        def shown(ids: np.ndarray) -> str:
            return str(int(ids[place])) if place < len(ids) else "the end"

        reason = (
            "the model directory's chat_template must be the family's own and chat.system_prompt "
            "what it begins with"
        )
        if image in [*got[place : place + 1], *wanted[place : place + 1]]:
            reason = (
                "image sizes differ: min_pixels and max_pixels must be those of model.path's "
                "preprocessor_config.json, and every context's images within --limit-mm-per-prompt"
            )
        raise ConfigError(
            f"{self._cfg.openai.url} did not read the context that was meant: of its {len(got)} "
            f"tokens number {place} is {shown(got)}, here it is {shown(wanted)} of {len(wanted)}; "
            f"{reason}; serve model.path itself"
        )

    async def _check_models(self) -> None:
        cfg, where = self._cfg, self._calls.where("GET", "models")
        cards = (await self._calls.json("GET", "models")).get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise EngineError(f"{where}: the answer has no list `data`")
        named = {card["id"]: card for card in cards if isinstance(card.get("id"), str)}
        if cfg.openai.model not in named:
            known = ", ".join(sorted(named)[:10])
            raise ConfigError(
                f"engine.openai.model={cfg.openai.model!r}: the server has {known or 'none'}"
            )
        holds = named[cfg.openai.model].get("max_model_len")
        needed = self._max_context + cfg.max_new_tokens
        if isinstance(holds, int) and holds < needed:
            raise ConfigError(
                f"{where}: {cfg.openai.model} takes {holds} tokens, contexts and completions may "
                f"have {needed}: serve it with --max-model-len {needed} or lower "
                "engine.context_lengths"
            )

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._count_seconds()
        self._running += 1
        try:
            yield
        finally:
            self._count_seconds()
            self._running -= 1

    def _count_seconds(self) -> None:
        now_s = time.perf_counter()
        self._seconds["busy" if self._running else "idle"] += now_s - self._changed_s
        self._changed_s = now_s

    # ---------------------------------------------------------------- policies

    async def _newest_model(self) -> tuple[_Policy, str]:
        """The newest policy and what the server calls it, once it is loaded there."""
        policy = self._next_policy
        if policy is not self._asked:
            # A task of its own: a caller that is cancelled must not leave it half loaded.
            self._asked = policy
            self._loading = asyncio.create_task(self._load(policy), name="load-policy")
            self._load_tasks.add(self._loading)
            self._loading.add_done_callback(self._load_tasks.discard)
        assert self._loading is not None  # created with the first policy
        return policy, await asyncio.shield(self._loading)

    async def _load(self, policy: _Policy) -> str:
        """Has the server load a policy; the name to sample from."""
        async with self._load_lock:
            started_s = time.perf_counter()
            arrays = await asyncio.to_thread(adapters_to_numpy, policy.lora)
            if not any(array.any() for name, array in arrays.items() if name.endswith("lora_b")):
                return self._cfg.openai.model
            self._loads += 1
            name = f"{self._name}-{self._loads}-v{policy.version}"
            self._adapters.append(name)  # from here on there is something to clear away
            await asyncio.to_thread(self._write_adapter, policy, self._directory(name))
            cfg = self._cfg.openai
            there = PurePosixPath(cfg.adapters_dir_there or Path(cfg.adapters_dir).resolve())
            body = {"lora_name": name, "lora_path": str(there / name)}
            try:
                await self._calls.send("POST", "load_lora_adapter", body, once=True)
            except EngineError as error:
                raise EngineError(
                    f"policy version {policy.version}: {error}; the server needs --enable-lora, "
                    "--max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and the directory "
                    f"{there}"
                ) from error
            self._seconds["load"] += time.perf_counter() - started_s
            await self._unload(keep=KEPT_ADAPTERS)
            return name

    async def _unload(self, keep: int) -> None:
        """All but the newest `keep`; one that a request still reads stays, and what is after it."""
        while len(self._adapters) > keep and not self._in_use[self._adapters[0]]:
            name = self._adapters.popleft()
            try:
                await self._calls.send(
                    "POST", "unload_lora_adapter", {"lora_name": name}, once=True
                )
            except EngineError as error:  # it costs the server memory, and nobody anything else
                logger.warning(key_values("adapter_not_unloaded", name=name, reason=error))
            await asyncio.to_thread(shutil.rmtree, self._directory(name), ignore_errors=True)

    def _directory(self, name: str) -> Path:
        return Path(self._cfg.openai.adapters_dir) / name

    def _write_adapter(self, policy: _Policy, directory: Path) -> None:
        try:
            save_adapter(self._model, directory, lora=policy.lora)
        except OSError as error:
            raise EngineError(f"{directory}: the adapter cannot be written ({error})") from error
