import transformers
from common import (
    ACCUMULATE,
    CHECK,
    MICROBATCH,
    STEPS,
    Text,
    build_model,
    log,
    optimizer,
    save,
    stack,
)

# user
model = build_model()
args = transformers.TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=MICROBATCH,
    gradient_accumulation_steps=ACCUMULATE,
    max_steps=STEPS,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    max_grad_norm=1e9,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)


class Log(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            log(state.global_step - 1, logs["loss"])


trainer = transformers.Trainer(
    model,
    args,
    train_dataset=Text(),
    data_collator=stack,
    optimizers=(optimizer(model.parameters()), None),
    callbacks=[Log()],
)
trainer.train()
# end
if CHECK and trainer.is_world_process_zero():
    save(trainer.accelerator.unwrap_model(trainer.model).state_dict())
