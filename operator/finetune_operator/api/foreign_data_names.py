"""Other tools' names of settings of the model and the data."""

from __future__ import annotations

from finetune_operator.api.foreign_conversions import (
    claim_of,
    config_name,
    data_file,
    data_sets,
    first_rows,
    held_out,
    in_four_bits,
)
from finetune_operator.api.foreign_rows import (
    AXOLOTL,
    EVERYBODY,
    FACTORY,
    HF,
    SPLITS,
    TOKENIZER_WITH_MODEL,
    ForeignName,
)

DATA_NAMES: tuple[ForeignName, ...] = (
    # ---- model
    ForeignName(
        ("model_name_or_path", "base_model", "model_name", "model_id", "base_model_name_or_path", "pretrained_model",
         "pretrained_model_name_or_path", "model_path", "pretrained", "backbone"),
        EVERYBODY, "spec.model.uri", "hf:// before the name of a Hub repository, file:// before a path",
    ),
    ForeignName(
        ("name", "path", "id", "repo", "repo_id", "hub_id", "checkpoint", "source"), EVERYBODY, "spec.model.uri",
        "hf:// before the name of a Hub repository, file:// before a path", under=("model",),
    ),
    ForeignName(
        ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_config", "tokenizer_type", "tokenizer", "model_type",
         "config_name", "use_fast_tokenizer", "special_tokens"),
        EVERYBODY, None, TOKENIZER_WITH_MODEL,
    ),
    ForeignName(("model_revision", "revision_of_model"), f"{HF}, {AXOLOTL}", "spec.model.revision"),
    ForeignName(("branch", "tag", "commit", "version", "ref"), HF, "spec.model.revision", under=("model",)),
    ForeignName(
        ("adapter", "finetuning_type", "peft_type", "peft_method", "tuner_type"), EVERYBODY, "spec.model.adapter.method"
    ),
    ForeignName(
        ("lora", "peft", "lora_config", "peft_config", "use_lora", "use_peft"), EVERYBODY, "spec.model.adapter.method",
        "beside it, r is rank, lora_alpha alpha, lora_dropout dropout and target_modules targetModules", "lora",
    ),
    ForeignName(("qlora",), EVERYBODY, "spec.model.adapter.method", "beside it, r is rank, lora_alpha alpha", "qlora"),
    ForeignName(("use_dora", "peft_use_dora"), EVERYBODY, "spec.model.adapter.method", value="dora"),
    ForeignName(("type", "name", "kind"), HF, "spec.model.adapter.method", under=("adapter",)),
    ForeignName(("type", "kind"), HF, "spec.model.adapter.method", under=("peft", "lora", "qlora")),
    ForeignName(("lora_r", "lora_rank"), EVERYBODY, "spec.model.adapter.rank"),
    ForeignName(("r",), HF, "spec.model.adapter.rank", under=("adapter", "model")),
    ForeignName(("lora_alpha",), EVERYBODY, "spec.model.adapter.alpha"),
    ForeignName(("lora_dropout",), EVERYBODY, "spec.model.adapter.dropout"),
    ForeignName(
        ("lora_target_modules", "lora_target"), EVERYBODY, "spec.model.adapter.targetModules",
        "auto stands for all linear layers",
    ),
    ForeignName(
        ("target", "targets", "modules"), HF, "spec.model.adapter.targetModules", "auto stands for all linear layers",
        under=("adapter", "lora", "peft", "qlora", "lora_config", "peft_config"),
    ),
    ForeignName(("lora_target_linear",), AXOLOTL, "spec.model.adapter.targetModules", "which is the default", "auto"),
    ForeignName(
        ("load_in_4bit", "quantization_bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "quantization_config",
         "quantization", "quantize"),
        EVERYBODY, "spec.model.adapter.method", value="qlora",
    ),
    ForeignName(
        ("bits", "nbits", "num_bits"), EVERYBODY, None,
        "leave it out: qlora holds the weights in 4 bits, every other method in 16 or 32", under=("adapter", "lora"),
        writes=in_four_bits,
    ),
    ForeignName(
        ("load_in_8bit",), EVERYBODY, None,
        "leave it out, or set spec.model.adapter.method to qlora, which holds the weights in 4 bits",
    ),
    ForeignName(
        ("modules_to_save", "use_rslora", "loftq_config", "lora_bias", "bias"), EVERYBODY, None,
        "leave it out: only the adapter and the task's head are trained",
    ),
    ForeignName(
        ("num_labels", "id2label", "label2id", "label_list", "labels", "classes", "num_classes"), HF, None,
        "leave it out: labels are read from the data",
    ),
    ForeignName(
        ("flash_attention", "flash_attn", "attn_implementation", "use_flash_attention_2", "sdp_attention",
         "xformers_attention"),
        EVERYBODY, None, "leave it out: torch's fused attention is used where the model supports it",
    ),
    # ---- data
    ForeignName(
        ("dataset_name", "datasets", "dataset_path", "data_path", "data_files", "dataset_dir", "data", "dataset_id"),
        EVERYBODY, "spec.dataset.uri", "hf:// before the name of a Hub repository, file:// before a path",
        writes=data_sets,
    ),
    ForeignName(
        ("train_file", "train_data", "train_dataset", "training_data", "training_file", "train_path", "train_uri",
         "train_csv", "train_set"),
        EVERYBODY, "spec.dataset.uri",
        "hf:// before the name of a Hub repository, file:// before a path", writes_beside=data_file("train"),
    ),
    *(
        ForeignName(
            names, EVERYBODY, f"{SPLITS}{role}", under=("dataset", "data_files", "files"),
            writes_beside=data_file(role),
        )
        for role, names in (
            ("train", ("train", "training")),
            ("validation", ("validation", "val", "valid", "dev", "eval")),
            ("test", ("test", "testing")),
        )
    ),
    ForeignName(
        ("name",), EVERYBODY, "spec.dataset.uri",
        "hf:// before the name of a Hub repository; the name of a configuration is spec.dataset.config",
        under=("dataset",), writes_beside=config_name,
    ),
    ForeignName(
        ("path", "id", "repo", "repo_id", "file", "files", "folder"), EVERYBODY, "spec.dataset.uri",
        "hf:// before the name of a Hub repository, file:// before a path", under=("dataset",),
        writes_beside=claim_of("dataset"),
    ),
    ForeignName(
        ("format", "data_format", "file_format"), EVERYBODY, None,
        "leave it out: the extension of a file determines its format", under=("dataset",),
    ),
    ForeignName(("dataset_config_name", "dataset_config", "subset"), HF, "spec.dataset.config"),
    ForeignName(
        ("revision", "dataset_revision", "data_revision"), HF, None,
        "append it to spec.dataset.uri, as hf://org/name@REVISION", under=("dataset",),
    ),
    ForeignName(
        ("delimiter", "separator", "sep", "encoding", "header", "quotechar", "has_header"), HF, None,
        "leave it out: the delimiter of CSV is detected, files are UTF-8, and the first line names the columns",
        under=("dataset",),
    ),
    ForeignName(
        ("dataset", "data", "eval_dataset", "test_dataset", "rows", "dataset_split"), EVERYBODY, None,
        "leave it out: rows of spec.dataset.splits.test are evaluated, or of validation", under=("evaluation",),
    ),
    ForeignName(("train_split", "dataset_train_split", "split"), EVERYBODY, "spec.dataset.splits.train"),
    ForeignName(
        ("eval_split", "validation_split", "dataset_test_split", "dev_split"), EVERYBODY,
        "spec.dataset.splits.validation",
    ),
    ForeignName(("test_split",), EVERYBODY, "spec.dataset.splits.test"),
    ForeignName(
        ("uri", "file", "data", "data_file", "input", "inputs", "input_path", "input_file", "input_uri", "input_data",
         "path"),
        EVERYBODY, "spec.predict.dataset.uri",
        under=("predict",),
    ),
    ForeignName(
        ("num_workers", "parallelism", "replicas", "completions", "num_processes", "num_proc", "concurrency",
         "partitions", "num_partitions", "num_shards", "shards"),
        EVERYBODY, "spec.predict.workers", under=("predict",),
    ),
    ForeignName(("output_format", "file_format", "file_type"), EVERYBODY, "spec.predict.format", under=("predict",)),
    ForeignName(
        ("id", "id_column", "row_id", "idx", "guid", "key"), HF, "spec.predict.idColumn",
        "which identifies the predictions; without spec.predict leave it out", under=("columns",),
    ),
    ForeignName(
        ("id", "id_field", "id_key", "key", "row_id", "index_column"), EVERYBODY, "spec.predict.idColumn",
        under=("predict",),
    ),
    ForeignName(("split",), EVERYBODY, "spec.dataset.splits.test", under=("evaluation", "predict")),
    ForeignName(("truncation", "truncate"), HF, None, "leave it out: rows are truncated to spec.preparation.maxLength"),
    ForeignName(
        ("validation_file", "eval_dataset", "eval_file", "validation_data", "dev_file", "eval_data", "eval_path",
         "validation_path", "val_path", "val_file", "dev_path", "eval_set", "validation_set"),
        EVERYBODY,
        "spec.dataset.splits.validation",
        "the file's name without its extension; spec.dataset.uri is the folder of all files", same=False,
        writes_beside=data_file("validation"),
    ),
    ForeignName(
        ("test_file", "test_datasets", "test_dataset", "test_data", "test_path", "test_set"), EVERYBODY,
        "spec.dataset.splits.test",
        "the file's name without its extension; spec.dataset.uri is the folder of all files", same=False,
        writes_beside=data_file("test"),
    ),
    ForeignName(
        ("val_set_size", "val_size", "validation_split_percentage", "validation_size", "eval_size",
         "validation_fraction", "dev_size"),
        EVERYBODY, None,
        "leave it out: 5 % are held out if no split is named validation; for another fraction, write the rows to "
        "train.csv and validation.csv of a folder that spec.dataset.uri names",
        writes=held_out("validation"),
    ),
    ForeignName(
        ("test_size", "test_fraction", "test_ratio", "test_split_percentage"), EVERYBODY, None,
        "leave it out: write the rows to train.csv and test.csv of a folder that spec.dataset.uri names",
        writes=held_out("test"),
    ),
    ForeignName(
        ("max_train_samples", "max_samples", "max_rows", "num_samples"), EVERYBODY, None,
        "leave it out: all rows of files are read; spec.training.maxSteps limits the training",
        writes=first_rows,
    ),
    ForeignName(
        ("text_column", "text_column_name", "dataset_text_field", "text_field", "input_column"), EVERYBODY,
        "spec.dataset.columns.text",
    ),
    ForeignName(("label_column", "label_column_name", "label_field"), HF, "spec.dataset.columns.label"),
    ForeignName(("question_column", "question_column_name"), HF, "spec.dataset.columns.question"),
    ForeignName(("context_column", "context_column_name"), HF, "spec.dataset.columns.context"),
    ForeignName(("answer_column", "answer_column_name"), HF, "spec.dataset.columns.answers"),
    ForeignName(("source_column", "prompt_column"), HF, "spec.dataset.columns.source"),
    ForeignName(
        ("summary_column", "target_column", "completion_column", "response_column"), HF, "spec.dataset.columns.target"
    ),
    ForeignName(
        ("max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "block_size", "model_max_length", "seq_length",
         "seq_len", "max_source_length", "max_length", "max_input_length", "max_prompt_length", "max_len",
         "context_length", "max_position_embeddings", "context_window"),
        EVERYBODY, "spec.preparation.maxLength", "in tokens",
    ),
    ForeignName(("sample_packing", "pack_sequences"), f"{AXOLOTL}, {FACTORY}", "spec.preparation.packing"),
    ForeignName(
        ("pad_to_sequence_len", "pad_to_max_length", "pad_to_multiple_of", "padding"), EVERYBODY, None,
        "leave it out: rows are padded to the longest of their micro-batch",
    ),
    ForeignName(
        ("preprocessing_num_workers", "dataset_num_proc", "dataset_processes", "num_proc"), EVERYBODY,
        "spec.preparation.workers",
    ),
    ForeignName(("doc_stride",), HF, "spec.preparation.stride"),
    ForeignName(
        ("template", "chat_template", "conversation", "prompt_template"), f"{AXOLOTL}, {FACTORY}", None,
        "leave it out: conversations use the chat template of the model's tokenizer",
        under=("dataset", "training", "preparation", "model", ""),
    ),
    ForeignName(
        ("train_on_inputs", "mask_prompt", "completion_only_loss", "assistant_only_loss"), EVERYBODY, None,
        "leave it out: the loss covers the answer and not its prompt",
    ),
    ForeignName(
        ("overwrite_cache", "dataset_prepared_path", "cache_dir", "streaming", "shuffle", "tokenized_path"), EVERYBODY,
        None, "leave it out: prepared rows are kept in the workspace, and shuffled with spec.training.seed",
    ),
)  # fmt: skip
