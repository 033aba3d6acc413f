"""Names that people bring from other trainers: each is answered with our key, or with a sentence that says what became of it."""

import re
import typing

import pytest

from argosy.core.errors import SettingsError, UserError, problems_of
from argosy.core.settings import Settings, mistakes
from argosy.core.settings.schema import Choice, shape_of
from argosy.run.settings.compose import compose, key_meant
from argosy.run.settings.other_trainers import ELSEWHERE
from argosy.run.settings.run import Run
from tools.pages import names_of

SENTENCE = None  # what is expected of a name that no key stands for

HUGGING_FACE = {
    "output_dir": "dir",
    "overwrite_output_dir": SENTENCE,
    "per_device_train_batch_size": "data.batch",
    "per_device_eval_batch_size": SENTENCE,
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip",
    "num_train_epochs": "data.epochs",
    "max_steps": "steps",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "logging_steps": "log.every",
    "logging_dir": SENTENCE,
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "load_best_model_at_end": "checkpoint.keep_best",
    "eval_steps": "eval.every",
    "data_seed": "data.seed",
    "bf16": "precision",
    "fp16": SENTENCE,
    "tf32": SENTENCE,
    "optim": "optimizer",
    "gradient_checkpointing": "execution.remat",
    "group_by_length": "data.packing",
    "report_to": SENTENCE,
    "dataloader_num_workers": "data.prefetch",
    "resume_from_checkpoint": SENTENCE,
    "push_to_hub": SENTENCE,
    "deepspeed": SENTENCE,
    "torch_compile": SENTENCE,
    "model_name_or_path": SENTENCE,
    "dataset_name": "data.source",
    "block_size": "data.sequence",
    "max_seq_length": "data.sequence",
    "label_smoothing_factor": SENTENCE,
    "neftune_noise_alpha": SENTENCE,
}
TORCHTITAN = {
    "training.steps": "steps",
    "training.seq_len": "data.sequence",
    "training.local_batch_size": "data.batch",
    "training.global_batch_size": "data.batch",
    "training.max_norm": "optimizer.clip",
    "training.dataset": "data.source",
    "training.mixed_precision_param": "precision",
    "optimizer.lr": "optimizer.learning_rate",
    "lr_scheduler.warmup_steps": "schedule.warmup",
    "lr_scheduler.decay_ratio": "schedule.decay",
    "lr_scheduler.decay_type": "schedule",
    "lr_scheduler.min_lr_factor": "schedule.final",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.folder": "dir",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "metrics.log_freq": "log.every",
    "metrics.enable_tensorboard": SENTENCE,
    "parallelism.data_parallel_shard_degree": "mesh.fsdp",
    "parallelism.data_parallel_replicate_degree": "mesh.data",
    "activation_checkpoint.mode": "execution.remat",
    "validation.freq": "eval.every",
    "validation.steps": "eval.batches",
    "compile.enable": SENTENCE,
    "job.dump_folder": "dir",
    "model.flavor": "model",
    "model.hf_assets_path": "data.tokenizer",
    "profiling.enable_profiling": SENTENCE,
}
AXOLOTL = {
    "base_model": SENTENCE,
    "datasets": "data.source",
    "sequence_len": "data.sequence",
    "sample_packing": "data.packing",
    "micro_batch_size": "data.batch",
    "num_epochs": "data.epochs",
    "val_set_size": "data.held_out",
    "lr_scheduler": "schedule",
    "dataset_prepared_path": "data.cache",
    "gradient_clipping": "optimizer.clip",
    "evals_per_epoch": "eval.every",
    "saves_per_epoch": "checkpoint.every",
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target_modules": "adapter.where",
    "peft_use_rslora": "adapter.rslora",
    "peft_init_lora_weights": "adapter.init",
    "lora_modules_to_save": "adapter.train",
    "load_in_4bit": "adapter.format",
    "load_in_8bit": "adapter.format",
    "merge_lora": SENTENCE,
    "flash_attention": SENTENCE,
    "wandb_project": SENTENCE,
    "train_on_inputs": "data.learn",
    "roles_to_train": "data.learn",
    "chat_template": "data.template",
    "excess_length_strategy": "data.too_long",
    "field_messages": "data.columns",
}
TRL = {
    "completion_only_loss": "data.learn",
    "assistant_only_loss": "data.learn",
    "chat_template_path": "data.template",
    "dataset_text_field": "data.columns",
}
NANOCHAT = {
    "depth": "model.layers",
    "max_seq_len": "data.sequence",
    "device_batch_size": "data.batch",
    "total_batch_size": "data.batch",
    "num_iterations": "steps",
    "embedding_lr": "optimizer.adam_learning_rate",
    "unembedding_lr": SENTENCE,
    "matrix_lr": "optimizer.learning_rate",
    "grad_clip": "optimizer.clip",
    "warmdown_ratio": "schedule.decay",
    "final_lr_frac": "schedule.final",
    "eval_every": "eval.every",
    "eval_tokens": "eval.batches",
    "sample_every": "sample.every",
    "core_metric_every": SENTENCE,
    "target_param_data_ratio": SENTENCE,
    "device_type": SENTENCE,
    "window_pattern": "model.pattern",
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "n_embd": "model.width",
    "max_iters": "steps",
    "min_lr": "schedule.final",
    "eval_interval": "eval.every",
    "dropout": SENTENCE,
}
MAXTEXT = {
    "base_output_directory": "dir",
    "run_name": "dir",
    "per_device_batch_size": "data.batch",
    "max_target_length": "data.sequence",
    "base_emb_dim": "model.width",
    "base_num_query_heads": "model.heads",
    "base_num_kv_heads": "model.kv_heads",
    "base_mlp_dim": "model.ffn",
    "base_num_decoder_layers": "model.layers",
    "head_dim": "model.head_size",
    "vocab_size": "model.vocab",
    "rope_max_timescale": "model.rope.base",
    "checkpoint_period": "checkpoint.every",
    "async_checkpointing": SENTENCE,
    "load_parameters_path": "init.weights",
    "load_full_state_path": "init.state",
    "ici_fsdp_parallelism": "mesh.fsdp",
    "ici_data_parallelism": "mesh.data",
    "dcn_data_parallelism": "mesh.between.data",
    "remat_policy": "execution.remat",
    "scan_layers": "execution.run",
    "weight_dtype": SENTENCE,
    "warmup_steps_fraction": "schedule.warmup",
    "cosine_learning_rate_final_fraction": "schedule.final",
    "gradient_clipping_threshold": "optimizer.clip",
    "adam_b1": "optimizer.b1",
    "opt_type": "optimizer",
    "tokenizer_path": "data.tokenizer",
    "quantization": SENTENCE,
    "attention": SENTENCE,
    "profiler": SENTENCE,
    "log_period": "log.every",
    "data_shuffle_seed": "data.seed",
}
# As its examples write them, with the groups that ours do not have.
VERL = {
    "data.train_files": "data.source",
    "data.val_files": SENTENCE,
    "data.train_batch_size": "data.batch",
    "data.max_prompt_length": SENTENCE,
    "data.max_response_length": "rollout.tokens",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "execution.remat",
    "actor_rollout_ref.model.use_remove_padding": SENTENCE,
    "actor_rollout_ref.actor.optim.lr": "optimizer.learning_rate",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "rollout.minibatches",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "rollout.rows",
    "actor_rollout_ref.actor.use_kl_loss": SENTENCE,
    "actor_rollout_ref.actor.kl_loss_coef": "objective.kl",
    "actor_rollout_ref.actor.fsdp_config.param_offload": SENTENCE,
    "actor_rollout_ref.rollout.n": "rollout.completions",
    "actor_rollout_ref.rollout.name": SENTENCE,
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.temperature": "objective.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.devices",
    "actor_rollout_ref.rollout.gpu_memory_utilization": SENTENCE,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "rollout.rows",
    "algorithm.adv_estimator": "objective.advantages",
    "algorithm.kl_ctrl.kl_coef": "objective.kl",
    "custom_reward_function.path": "reward",
    "trainer.logger": SENTENCE,
    "trainer.experiment_name": "dir",
    "trainer.n_gpus_per_node": SENTENCE,
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "trainer.total_epochs": "data.epochs",
}
NAMES = {
    f"{trainer}: {name}": (name, key)
    for trainer, names in {
        "hugging face": HUGGING_FACE,
        "torchtitan": TORCHTITAN,
        "axolotl": AXOLOTL,
        "trl": TRL,
        "nanochat": NANOCHAT,
        "maxtext": MAXTEXT,
        "verl": VERL,
    }.items()
    for name, key in names.items()
}


@pytest.fixture(scope="module")
def readings():
    """What a run may have: names of the optimizer and the schedule that are chosen count."""
    words = [[], ["optimizer=muon", "schedule=wsd"], ["adapter=lora", "init.weights=x"], ["adapter=qlora", "init.weights=x"]]
    rewarded = compose(Run, "grpo", ["model=argosy-1m", "data.source=x", "data.sequence=32", "reward=a.py:b"])
    return [rewarded, *(compose(Run, "tiny", each) for each in words)]


@pytest.mark.parametrize("name", ["model_name_or_path", "base_model", "pretrained_model_name_or_path"])
def test_a_model_by_the_name_of_other_trainers_is_the_setting_that_takes_its_architecture_too(name: str):
    with pytest.raises(SettingsError) as caught:
        compose(Run, "sft", ["data.source=x.jsonl", f"{name}=folder"])
    assert "hint: `model=FOLDER` takes the architecture and the weights" in str(caught.value)


@pytest.mark.parametrize(("name", "key"), NAMES.values(), ids=NAMES)
def test_a_name_of_another_trainer_is_answered(readings, name, key):
    hints = [mistakes.unknown_key(name, None, reading.names).hint for reading in readings]
    if key is SENTENCE:
        assert set(hints) <= set(ELSEWHERE.values())
    else:
        notes = {other: note for other, trainer_name, note in names_of(Run) if trainer_name == key}
        note = notes.get(name) or notes.get(name.rpartition(".")[2])
        assert f"did you mean `{key}`?" + (f" {note}" if note else "") in hints


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("per_device_train_batch_size", "`data.batch`? it is the whole batch, over all devices"),
        ("batch_size", "per device x devices x accumulation"),
        ("total_batch_size", "`data.batch`? it counts rows: tokens / data.sequence"),
        ("gradient_accumulation_steps", "`accumulate`? it splits data.batch into so many parts; it does not multiply it"),
        ("bf16", "bf16=true is precision=bfloat16"),
        ("fp16", "float16 is not built: precision=bfloat16"),
        ("min_lr", "`schedule.final`? it is a share of the peak, not a rate"),
        ("betas", "optimizer.b1 and optimizer.b2"),
        ("resume_from_checkpoint", "the same command resumes"),
        ("completion_only_loss", "`data.learn`? answers, the default, is that"),
        ("train_on_inputs", "`data.learn`? data.learn=all is that"),
        ("lora_r", "`adapter=lora adapter.rank=...`?"),
        ("load_in_4bit", "`adapter=qlora adapter.format=...`? nf4, the default, is bitsandbytes' 4 bit"),
        ("use_dora", "adapter=dora"),
    ],
)
def test_an_answer_says_how_the_value_differs(readings, name, says):
    assert says in (mistakes.unknown_key(name, None, readings[1].names).hint or "")


def test_a_setting_typed_with_dashes_is_named_without_the_note():
    assert key_meant("batch_size") == "data.batch"


def test_the_table_is_as_long_as_promised():
    assert len(NAMES) >= 87


def test_no_name_is_marked_that_is_a_key_and_none_is_answered_twice(readings):
    marked = {name: key for name, key, _ in names_of(Run)}
    keys = {key for reading in readings for key in reading.names.known}
    assert not marked.keys() & keys
    assert not marked.keys() & ELSEWHERE.keys()


def test_sentences_name_settings_and_verbs_that_exist(readings):
    groups = {key.partition(".")[0] for key in readings[1].names.known}
    keys = {key for reading in readings for key in reading.names.known}
    for sentence in ELSEWHERE.values():
        for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", sentence):
            if word.partition(".")[0] in groups and not word.endswith(("jsonl", "html")):
                assert word in keys, sentence


def test_a_key_of_what_is_chosen_wins_over_another_trainers_name():
    """`beta` is GRPO's weight of the divergence elsewhere, and DPO's own key here."""
    words = ["model=stories260k", "data.source=pairs.jsonl", "data.sequence=256"]
    assert mistakes.unknown_key("beta", None, compose(Run, "dpo", words).names).hint == "did you mean `objective.beta`?"
    grpo = compose(Run, "grpo", [*words, "reward=exact"])
    assert "objective.kl" in str(mistakes.unknown_key("beta", None, grpo.names).hint)


def test_no_setting_has_a_value_none_beside_none():
    """`key=none` is no value; a choice of that name beside it could not be made, and would be left out in silence."""

    def groups(schema: type[Settings]):
        yield schema
        for info in schema.model_fields.values():
            kind = shape_of(info)
            inner = [kind.of] if kind.kind == "group" else []
            inner += [kind.of.pick(name) for name in kind.of.registry] if isinstance(kind.of, Choice) else []
            for inner_schema in inner:
                yield from groups(inner_schema)

    both = {
        f"{schema.__name__}.{name}"
        for schema in groups(Run)
        for name, info in schema.model_fields.items()
        for options in [typing.get_args(info.annotation)]
        if type(None) in options and any("none" in typing.get_args(option) for option in options)
    }
    assert both == set()


@pytest.mark.parametrize(
    ("recipe", "words", "problem", "hints"),
    [
        ("distill", ["model=argosy-1m", "data.source=x"], "`distill` needs `objective.teacher`", ["train distill ", "TEACHER_FOLDER"]),
        ("gkd", [], "`gkd` needs `model` and `data.source` and `objective.teacher`", ["model=STUDENT_FOLDER", "=TEACHER_FOLDER"]),
        ("tiny", ["objective=distill"], "`objective.teacher` is required", ["add `objective.teacher=TEACHER_FOLDER`: The model to"]),
        ("grpo", [], "`grpo` needs `model` and `data.source` and `reward` or `environment`", ["reward=maths", "def FUNCTION(comple"]),
        ("grpo-qwen3", ["model=argosy-1m", "data.source=x"], "`grpo-qwen3` needs `reward` or `environment`", ["FILE.py:FUNCTION;"]),
        ("tiny", ["objective=grpo"], "reward is missing: reward=maths", []),
        ("dpo", ["data.source=x"], "`dpo` needs `model`", ["argosy train dpo model=FOLDER"]),
    ],
)
def test_what_is_needed_is_said_with_an_example(recipe: str, words: list[str], problem: str, hints: list[str]):
    with pytest.raises(UserError) as caught:
        compose(Run, recipe, [*words, "data.sequence=32"])
    (found_problem,) = problems_of(caught.value)
    assert found_problem.what.startswith(problem)
    assert all(hint in str(found_problem.hint) for hint in hints)
    assert str(found_problem.hint).count("reward=FILE.py:FUNCTION") <= 1
    assert ("reward=" in str(found_problem.hint)) == ("grpo" in recipe)


def test_what_a_recipe_needs_is_said_once():
    with pytest.raises(SettingsError) as caught:
        compose(Run, "grpo", ["model=argosy-1m", "data.source=x", "data.sequence=32", "optimizer.b1=2"])
    assert [problem.what.partition(",")[0] for problem in caught.value.problems] == [
        "`grpo` needs `reward` or `environment`",
        "`optimizer.b1` should be less than 1",
    ]
    with pytest.raises(SettingsError) as caught:
        compose(Run, "grpo", ["model=argosy-1m", "data.source=x", "data.sequence=32", "environment=calculator"])
    assert [problem.what.partition(":")[0] for problem in caught.value.problems] == ["reward is missing"], (
        "an environment that gives none"
    )
