"""Setting names of other trainers that have no counterpart here, each with a sentence that says what to do instead.

Names that correspond to a setting are marked on it (`core.settings.schema.Also`). `tools.pages` writes both to a page.
"""

_TRACKERS = "track names trackers: track=tensorboard, track='[{name: wandb, project: NAME}]'; docs/guides/trackers.md"
_DEVICE = "JAX uses the accelerator it finds; the variable JAX_PLATFORMS=cpu, cuda or tpu chooses"
_DROPOUT = "dropout of the model itself is not built: one pass over much text does not need it; adapter.dropout is that of adapters"
_PROFILE = "profiling a run is not built yet; metrics.jsonl and report.html show where its time went"
_RESUMES = "the same command resumes: a run directory continues from its last good checkpoint"
_HUB = "nothing is uploaded: `argosy convert RUN FOLDER` writes a Hub folder"
_LOADERS = "data is read ahead by threads: data.prefetch is how many batches"
_COMPILED = "every step is compiled, and compiled programs are kept between runs"
_ATTENTION = "attention is chosen by the device it runs on; `execution.attention` names another"
_ENGINE_MEMORY = "rollout.slots is how many answers are generated at a time, which decides the memory of the engine"
_OFFLOAD = "execution.offload=weights: the weights of the layers and the optimizer's state in the host's memory"
_DEVICES = (
    "a process trains on every device that it finds; `argosy launch processes=N` starts several, as other launchers start one a host"
)
_DEEPSPEED = "mesh.fsdp splits weights and optimizer state over devices, as ZeRO stage 3 does"

_MODEL = "`model=FOLDER` takes the architecture and the weights from a folder, a GGUF file or a run"

_SPLIT = "data.source=hf:NAME:SUBSET:SPLIT names them in one word"

ELSEWHERE: dict[str, str] = {
    "model_name_or_path": _MODEL,
    "base_model": _MODEL,
    "pretrained": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
    # data and sizes, as TRL, axolotl, litgpt and nanochat name them
    "dataset_config": _SPLIT,
    "dataset_config_name": _SPLIT,
    "dataset_split": _SPLIT,
    "dataset_train_split": _SPLIT,
    "train_split": _SPLIT,
    "special_tokens": "special tokens are the tokenizer's own: data.tokenizer=FOLDER names another",
    "train.max_tokens": "steps counts updates: tokens / (data.batch x data.sequence)",
    "checkpoint_dir": "model=FOLDER is the model to begin with; checkpoints are written into the run's directory, dir=PATH",
    "aspect_ratio": "the width does not follow from the depth: model.width, model.heads and model.ffn set it",
    "logger_name": _TRACKERS,
    # reinforcement learning, as verl and TRL name it
    "max_prompt_length": "prompt and answer share data.sequence: a prompt may have data.sequence less rollout.tokens",
    "use_kl_loss": "objective.kl is the weight of the divergence from the reference; 0 is none",
    "use_kl_in_reward": "objective.kl is the weight of the divergence; objective.kl_in=reward subtracts it from the reward",
    "rollout.name": "the engine that answers is Argosy's own",
    "use_vllm": "the engine that answers is Argosy's own",
    "gpu_memory_utilization": _ENGINE_MEMORY,
    "vllm_gpu_memory_utilization": _ENGINE_MEMORY,
    "use_remove_padding": "answers are always packed into rows, without padding between them",
    "param_offload": _OFFLOAD,
    "parameter_memory_host_offload": _OFFLOAD,
    "critic_warmup": "the critic learns from the first step; updates of the critic alone are not built",
    "critic.optim.lr": "the critic is trained by the same optimizer, at optimizer.learning_rate",
    "critic.model.path": "the critic begins as the model itself, with a head of its own",
    "algorithm.gamma": "objective=ppo has a critic, whose discount is objective.critic.gamma",
    "algorithm.lam": "objective=ppo has a critic, whose lambda is objective.critic.lam",
    "val_files": "data.held_out is the share of prompts or records that is set apart for evaluation",
    "val_batch_size": "evaluation takes batches of data.batch; eval.batches sets how many",
    # adapters and quantized training
    "use_dora": "adapter=dora",
    "peft_use_dora": "adapter=dora",
    "lora_bias": "biases are not trained beside an adapter",
    "bnb_4bit_use_double_quant": "scales of blocks stay float32; adapter.block sets how many weights share one",
    "bnb_4bit_compute_dtype": "precision is the type of the activations, also over a quantized base",
    "merge_lora": "`argosy convert RUN FOLDER` merges; the PEFT folder is `adapter/` in the run directory",
    "quantization": "adapter=qlora trains adapters on a quantized base",
    "fp8": "training in FP8 is not built",
    # trackers, profiles, uploads
    "report_to": _TRACKERS,
    "wandb": _TRACKERS,
    "wandb_log": _TRACKERS,
    "wandb_project": _TRACKERS,
    "wandb_run_name": _TRACKERS,
    "logging_dir": _TRACKERS,
    "trainer.logger": _TRACKERS,
    "project_name": _TRACKERS,
    "enable_tensorboard": _TRACKERS,
    "enable_wandb": _TRACKERS,
    "tensorboard_dir": _TRACKERS,
    "profiler": _PROFILE,
    "enable_profiling": _PROFILE,
    "profile_freq": _PROFILE,
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_token": _HUB,
    # how a run goes
    "resume": _RESUMES,
    "resume_mode": _RESUMES,
    "auto_resume_from_checkpoints": _RESUMES,
    "resume_from_checkpoint": _RESUMES,
    "overwrite_output_dir": "nothing is ever overwritten: dir=NEW starts another run",
    "enable_checkpointing": "checkpoints are always written: checkpoint.every sets the steps between them",
    "save_safetensors": _HUB,
    "save_only_model": "a checkpoint holds the whole state; `argosy convert RUN FOLDER` writes the weights alone",
    "async_checkpointing": "checkpoints are always written in the background",
    "async_mode": "checkpoints are always written in the background",
    "target_param_data_ratio": "steps sets the length of a run: tokens are steps x data.batch x data.sequence",
    "target_flops": "steps sets the length of a run; `argosy models show MODEL` prints the FLOPs of a token",
    "tokens": "steps sets the length of a run: tokens are steps x data.batch x data.sequence",
    "total_tokens": "steps sets the length of a run: tokens are steps x data.batch x data.sequence",
    "do_train": "`argosy train RECIPE` trains, and evaluates every eval.every steps",
    "do_eval": "eval.batches=0 turns evaluation off",
    "early_stopping_patience": "early stopping is not built; checkpoint.keep_best keeps the checkpoints of lowest evaluation loss",
    "dataloader_pin_memory": _LOADERS,
    "grain_worker_count": _LOADERS,
    "torch_compile": _COMPILED,
    "compile": _COMPILED,
    "compile.enable": _COMPILED,
    "device": _DEVICE,
    "n_gpus_per_node": _DEVICES,
    "nnodes": _DEVICES,
    "device_type": _DEVICE,
    "use_cpu": _DEVICE,
    "no_cuda": _DEVICE,
    "hardware": _DEVICE,
    "tf32": "the precision of activations is `precision`; matrix products of float32 follow the device's default",
    "deepspeed": _DEEPSPEED,
    "zero_stage": _DEEPSPEED,
    "ddp": "mesh.data copies the weights to every device, as DDP does; the default, mesh.fsdp, splits them",
    "data_parallel": "mesh.data copies the weights to every device; mesh.fsdp splits them",
    "attention": _ATTENTION,
    "flash_attention": _ATTENTION,
    "weight_dtype": "weights and optimizer state are float32; precision is the type of the activations",
    # data and objectives
    "dropout": _DROPOUT,
    "attention_dropout": _DROPOUT,
    "label_smoothing": "label smoothing is not built",
    "label_smoothing_factor": "label smoothing is not built",
    "neftune_noise_alpha": "noise on embeddings is not built",
    "betas": "two settings: optimizer.b1 and optimizer.b2",
    "fp16": "float16 is not built: precision=bfloat16 takes as much memory and needs no loss scaling",
    "per_device_eval_batch_size": "evaluation takes batches of data.batch sequences; eval.batches sets how many",
    "eval_batch_size": "evaluation takes batches of data.batch sequences; eval.batches sets how many",
    "core_metric_every": "benchmarks during training are not built yet; eval.every evaluates the loss on held-out text",
    "unembedding_lr": "optimizer=muon trains matrices at optimizer.learning_rate and everything else at optimizer.adam_learning_rate",
    "ema": "averaging weights is not built yet",
    "loss_chunk": "objective.chunk is the number of rows of logits that exist at once, under objective.head=chunks",
}
