"""The demo's arithmetic: reward, advantages, log-probs, loss, mismatch, one step, the builder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

from rollway.demo import model as builder  # noqa: E402
from rollway.demo.grpo import (  # noqa: E402
    GrpoConfig,
    GrpoTrainer,
    RolloutBatch,
    completion_mask,
    compute_clipped_loss,
    group_advantages,
    mismatch_kl,
    pad_rows,
    token_logprobs,
)
from rollway.demo.task import INSTRUCTION, CountingTask  # noqa: E402

KV_BLOCK = 32


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return builder.build_tokenizer()


@pytest.fixture(scope="module")
def task(tokenizer: PreTrainedTokenizerFast) -> CountingTask:
    return CountingTask(tokenizer)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a checkpoint after a short warm-up: the arithmetic does not need a good policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "WARMUP_STEPS", 2)
        return builder.build_base(tmp_path_factory.mktemp("demo") / "base")


@pytest.fixture
def policy(base: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


class TestTask:
    def test_prompts_share_several_kv_blocks(self, task: CountingTask) -> None:
        prompts = task.prompts(10, Random(0))
        heads = {tuple(prompt.token_ids[:-1]) for prompt in prompts}
        assert len(heads) == 1
        assert len(heads.pop()) >= 4 * KV_BLOCK

    def test_starts_are_distributed_evenly(self, task: CountingTask) -> None:
        starts = [prompt.start for prompt in task.prompts(16, Random(3))]
        assert set(starts) == set(range(10))
        assert max(starts.count(digit) for digit in range(10)) == 2

    def test_the_seed_decides_the_prompts(self, task: CountingTask) -> None:
        def draw_starts(seed: int) -> list[int]:
            return [prompt.start for prompt in task.prompts(16, Random(seed))]

        assert draw_starts(1) == draw_starts(1)
        assert draw_starts(1) != draw_starts(2)

    def test_the_right_count_earns_the_full_reward(
        self, task: CountingTask, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        seven = next(p for p in task.prompts(10, Random(0)) if p.start == 7)
        answer = tokenizer.encode("8901234567890123456789"[: task.max_tokens])
        assert task.reward(seven, answer) == 1.0

    def test_reward_is_the_fraction_of_right_positions(self, task: CountingTask) -> None:
        prompt = task.prompts(1, Random(0))[0]
        wrong = [*prompt.answer_ids]
        wrong[0], wrong[3] = wrong[1], wrong[4]
        assert task.reward(prompt, wrong) == pytest.approx(1 - 2 / task.max_tokens)

    def test_short_and_long_answers_earn_less(self, task: CountingTask) -> None:
        prompt = task.prompts(1, Random(0))[0]
        assert task.reward(prompt, []) == 0.0
        assert task.reward(prompt, prompt.answer_ids[:3]) == 3 / task.max_tokens
        assert task.reward(prompt, prompt.answer_ids * 2) == 0.5

    def test_ignoring_the_prompt_earns_a_tenth(self, task: CountingTask) -> None:
        prompts = task.prompts(10, Random(0))
        for constant in (prompts[0].answer_ids, [task.digit_ids[4]] * task.max_tokens):
            rewards = [task.reward(prompt, constant) for prompt in prompts]
            assert sum(rewards) / 10 == pytest.approx(0.1)


class TestAdvantages:
    def test_advantages_are_centred_and_scaled_within_the_group(self) -> None:
        rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.2, 0.2, 0.2, 0.6]])
        advantages = group_advantages(rewards)
        assert torch.allclose(advantages[0], torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-3)
        assert torch.allclose(advantages.mean(dim=1), torch.zeros(2), atol=1e-6)
        assert torch.allclose(advantages.std(dim=1, correction=0), torch.ones(2), atol=1e-3)

    @pytest.mark.parametrize("value", [0.0, 1.0, 1 / 3, 0.1])
    def test_a_constant_group_has_zero_advantage(self, value: float) -> None:
        # The mean of equal floats may differ from them by a rounding error, which is no advantage.
        advantages = group_advantages(torch.full((2, 7), value))
        assert torch.equal(advantages, torch.zeros(2, 7))


class TestTokenLogprobs:
    PROMPTS = ((5, 6, 7), (9,), (1, 2, 3, 4, 5, 6))
    COMPLETIONS = ((10, 11), (12, 13, 14, 15), (16,))

    def test_batched_logprobs_equal_those_of_single_rows(self, policy: torch.nn.Module) -> None:
        with torch.no_grad():
            batched = token_logprobs(policy, self.PROMPTS, self.COMPLETIONS)
            for row, prompt, ids in zip(batched, self.PROMPTS, self.COMPLETIONS, strict=True):
                logits = policy(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
                for t, token in enumerate(ids):
                    expected = logits[len(prompt) - 1 + t].log_softmax(-1)[token]
                    assert row[t].item() == pytest.approx(expected.item(), abs=1e-5)

    def test_padding_is_zero_and_masked(self, policy: torch.nn.Module) -> None:
        mask = completion_mask(self.COMPLETIONS)
        assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
        with torch.no_grad():
            logprobs = token_logprobs(policy, self.PROMPTS, self.COMPLETIONS)
        assert torch.all(logprobs[mask == 0] == 0)
        assert torch.all(logprobs[mask == 1] < 0)


class TestLoss:
    def test_the_loss_on_policy_is_minus_the_mean_advantage(self) -> None:
        lp = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
        mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
        loss = compute_clipped_loss(lp, lp, torch.tensor([1.0, -0.5]), mask)
        assert loss.item() == pytest.approx(-(1.0 + 1.0 - 0.5) / 3)

    def test_the_gradient_is_the_policy_gradient(self) -> None:
        lp = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
        mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
        compute_clipped_loss(lp, lp.detach(), torch.tensor([1.0, -0.5]), mask).backward()
        assert torch.allclose(lp.grad, torch.tensor([[-1.0, -1.0], [0.5, 0.0]]) / 3)

    @pytest.mark.parametrize(
        ("ratio", "advantage", "expected"),
        [
            (1.5, 1.0, 1.2),  # already raised enough: clipped
            (0.5, 1.0, 0.5),  # lowered though good: the full gradient raises it again
            (0.5, -1.0, -0.8),  # already lowered enough: clipped
            (1.5, -1.0, -1.5),  # raised though bad: the full gradient lowers it again
        ],
    )
    def test_the_loss_is_clipped_on_the_side_of_the_advantage(
        self, ratio: float, advantage: float, expected: float
    ) -> None:
        new = torch.tensor([[math.log(ratio)]])
        loss = compute_clipped_loss(
            new, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1)
        )
        assert loss.item() == pytest.approx(-expected)


class TestMismatch:
    def test_the_kl_is_zero_for_equal_logprobs_and_exact_for_one_gap(self) -> None:
        lp, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
        assert mismatch_kl(lp, lp, mask).item() == 0.0
        d = 0.3
        engine = torch.tensor([[-1.0 - d, -2.0]])
        expected = (math.exp(d) - d - 1) / 2
        assert mismatch_kl(lp, engine, mask).item() == pytest.approx(expected, rel=1e-5)

    def test_small_gaps_are_not_lost_to_rounding(self) -> None:
        engine = torch.full((1, 64), -0.25)
        trainer = engine + 2.0**-20  # exact in float32 at this size
        measured = mismatch_kl(trainer, engine, torch.ones(1, 64)).item()
        assert measured == pytest.approx(2.0**-41, rel=1e-3)

    def test_padding_does_not_count(self) -> None:
        mask = torch.tensor([[1.0, 0.0]])
        kl = mismatch_kl(torch.tensor([[-1.0, 0.0]]), torch.tensor([[-1.0, -9.0]]), mask)
        assert kl.item() == 0.0


def make_batch(task: CountingTask, policy: torch.nn.Module, *, shift: float = 0.0) -> RolloutBatch:
    """Make a right and a wrong rollout; the "engine" is the policy plus a shift."""
    prompt = task.prompts(1, Random(0))[0]
    prompts = [prompt.token_ids] * 2
    completions = [prompt.answer_ids, prompt.answer_ids[3:] + prompt.answer_ids[:3]]
    rewards = [task.reward(prompt, ids) for ids in completions]
    with torch.no_grad():
        logprobs = (token_logprobs(policy, prompts, completions) + shift).tolist()
    advantages = group_advantages(torch.tensor([rewards])).flatten().tolist()
    return RolloutBatch(prompts, completions, advantages, logprobs)


class TestTrainer:
    def test_a_step_favours_the_better_completion(
        self, task: CountingTask, policy: torch.nn.Module
    ) -> None:
        batch = make_batch(task, policy)
        trainer = GrpoTrainer(policy)
        before = torch.tensor(batch.engine_logprobs).sum(dim=1)
        stats = trainer.train_step(batch)
        with torch.no_grad():
            after = token_logprobs(policy, batch.prompt_ids, batch.completion_ids).sum(dim=1)
        good, bad = (after - before).tolist()
        assert good > bad
        assert stats.mismatch_kl == pytest.approx(0.0, abs=1e-9)

    def test_the_mismatch_is_measured_before_the_update(
        self, task: CountingTask, policy: torch.nn.Module
    ) -> None:
        trainer = GrpoTrainer(policy, GrpoConfig(lr=0.1, lr_warmup_steps=1))
        stats = trainer.train_step(make_batch(task, policy, shift=-0.3))
        assert stats.mismatch_kl == pytest.approx(math.exp(0.3) - 0.3 - 1, rel=1e-3)

    def test_the_learning_rate_rises_to_its_value(
        self, task: CountingTask, policy: torch.nn.Module
    ) -> None:
        trainer = GrpoTrainer(policy, GrpoConfig(lr=1e-4, lr_warmup_steps=2))
        batch = make_batch(task, policy)
        rates = []
        for _ in range(3):
            rates.append(trainer.optimizer.param_groups[0]["lr"])
            trainer.train_step(batch)
        assert rates == pytest.approx([5e-5, 1e-4, 1e-4])

    def test_a_batch_needs_matching_lengths(self) -> None:
        with pytest.raises(ValueError, match="one log-prob per sampled token"):
            RolloutBatch([[1]], [[2, 3]], [0.0], [[-1.0]])
        with pytest.raises(ValueError, match="one entry per completion"):
            RolloutBatch([[1]], [[2], [3]], [0.0, 0.0], [[-1.0], [-1.0]])


class TestBuilder:
    def test_the_checkpoint_is_complete(self, base: Path, task: CountingTask) -> None:
        config = json.loads((base / "config.json").read_text())
        generation = json.loads((base / "generation_config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(base)
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert config["head_dim"] % KV_BLOCK == 0
        assert config["vocab_size"] == len(tokenizer)
        assert generation["temperature"] == 0.7
        assert (generation["top_p"], generation["top_k"]) == (0.9, 20)
        assert tokenizer.eos_token_id == config["eos_token_id"]
        prompt = task.prompts(1, Random(0))[0]
        text = f"{INSTRUCTION}{prompt.start}"
        assert tokenizer.encode(text) == prompt.token_ids
        assert tokenizer.decode(prompt.token_ids) == text
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "7"}], tokenize=False, add_generation_prompt=True
        )
        assert chat == "<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"

    def test_the_build_leaves_no_other_files(self, base: Path) -> None:
        assert [path.name for path in base.parent.iterdir()] == [base.name]

    def test_a_complete_checkpoint_is_not_rebuilt(self, base: Path) -> None:
        def list_files() -> dict[str, tuple[int, int]]:
            return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in base.iterdir()}

        before = list_files()
        assert builder.build_base(base) == base
        assert list_files() == before

    def test_an_interrupted_build_leaves_no_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(builder, "save_tokenizer", interrupt)
        monkeypatch.setattr(builder, "WARMUP_STEPS", 0)
        with pytest.raises(KeyboardInterrupt):
            builder.build_base(tmp_path / "base")
        assert list(tmp_path.iterdir()) == []

    def test_an_outdated_checkpoint_is_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(builder, "WARMUP_STEPS", 0)
        directory = builder.build_base(tmp_path / "base")
        (directory / "leftover").touch()
        monkeypatch.setattr(builder, "FORMAT", builder.FORMAT + 1)
        builder.build_base(directory)
        assert not (directory / "leftover").exists()
        assert json.loads((directory / builder.MARKER).read_text())["format"] == builder.FORMAT
        assert list(tmp_path.iterdir()) == [directory]

    def test_foreign_files_are_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(OSError, match="not empty"):
            builder.build_base(tmp_path)
        assert (tmp_path / "thesis.tex").exists()

    def test_the_random_stream_of_the_caller_is_not_changed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(builder, "WARMUP_STEPS", 0)
        state = torch.random.get_rng_state()
        builder.build_base(tmp_path / "base")
        assert torch.equal(torch.random.get_rng_state(), state)


def test_a_step_computes_where_the_model_is(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's stand-in for a device: it has no values, and checks where operands are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = AutoModelForCausalLM.from_pretrained(base).config
    prompts, completions = TestTokenLogprobs.PROMPTS, TestTokenLogprobs.COMPLETIONS
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).eval()
        logprobs = token_logprobs(model, prompts, completions)
        mask = completion_mask(completions, model.device)
        old = pad_rows([[-1.0] * len(ids) for ids in completions], model.device)
        advantages = torch.ones(len(prompts), device=model.device)
        assert mismatch_kl(logprobs.detach(), old, mask).device.type == "meta"
        compute_clipped_loss(logprobs, old, advantages, mask).backward()
        monkeypatch.setattr("rollway.demo.grpo.pad_rows", lambda rows, _: pad_rows(rows))
        with pytest.raises(RuntimeError, match="two devices"):  # the control
            token_logprobs(model, prompts, completions)
