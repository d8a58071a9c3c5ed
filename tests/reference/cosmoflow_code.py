"""The benchmark's CosmoFlow code from a clone, in a Python with TensorFlow; as a program, two steps with given weights.

    python cosmoflow_code.py CODE SETTINGS WEIGHTS DATA OUT

It runs on one rank, with a stand-in for horovod that is not initialised.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from typing import Any

import numpy as np


def load(code: str) -> types.SimpleNamespace:
    """The reference's functions for data, network, optimizer and schedule."""

    def not_initialised(*_: Any, **__: Any) -> None:
        raise ValueError

    for name in ("horovod", "horovod.tensorflow", "horovod.tensorflow.keras"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["horovod.tensorflow.keras"].__dict__.update(rank=not_initialised, allreduce=not_initialised)
    sys.path.insert(0, code)
    from data import get_datasets
    from models import get_model
    from utils.optimizers import get_lr_schedule, get_optimizer

    return types.SimpleNamespace(
        data_sets=get_datasets, network=get_model, optimizer=get_optimizer, schedule=get_lr_schedule
    )


def main() -> None:
    import tensorflow as tf

    settings, weights, data, out = sys.argv[2:]
    code, given = load(sys.argv[1]), json.loads(settings)

    class Largest(tf.keras.layers.Layer):
        def __init__(self, pool_size):
            super().__init__()

        def call(self, x):
            return functools.reduce(
                tf.maximum, (x[:, a::2, b::2, c::2] for a in (0, 1) for b in (0, 1) for c in (0, 1))
            )

    one_rank = types.SimpleNamespace(rank=0, size=1, local_rank=0, local_size=1)
    fixed = {"compression": "GZIP", "n_epochs": 1, "shuffle_train": False, "apply_log": True, "prefetch": 1}
    sets = code.data_sets(name="cosmo", dist=one_rank, data_dir=data, **fixed, **given["data"])
    train, found = list(sets["train_dataset"]), {}
    for split in ("train", "valid"):
        for name, parts in zip("xy", zip(*sets[f"{split}_dataset"], strict=True), strict=True):
            found[f"{split}.{name}"] = np.concatenate([part.numpy() for part in parts])
    found["count"] = code.network(**given["model"] | {"input_shape": [128, 128, 128, 4]}).count_params()
    arrays, models = np.load(weights), []
    tf.keras.layers.Largest = Largest
    for pooling in ("MaxPool3D", "Largest"):
        model = code.network(input_shape=given["data"]["sample_shape"], pooling_type=pooling, **given["model"])
        model.set_weights([arrays[name] for name in arrays.files])
        model.compile(optimizer=code.optimizer("SGD", momentum=0.9), loss="mse", metrics=["mean_absolute_error"])
        models.append(model)
    (x, y), *_ = train
    predicted = models[0](x, training=True)
    loss = models[0].compute_loss(x=x, y=y, y_pred=predicted)
    evaluated = models[0].evaluate(sets["valid_dataset"], steps=sets["n_valid_steps"], verbose=0, return_dict=True)
    with tf.GradientTape() as tape:
        again = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    gradients = tape.gradient(again, model.trainable_variables)
    for rate, (x, y) in zip(given["rates"], train, strict=True):
        model.optimizer.learning_rate = rate
        model.train_on_batch(x, y)
    schedule = code.schedule(decay_schedule=dict(given["decay"]), **given["schedule"])
    found |= {f"gradient.{n}": value.numpy() for n, value in enumerate(gradients)}
    found |= {f"trained.{n}": value for n, value in enumerate(model.get_weights())}
    rates = [schedule(epoch) for epoch in range(given["epochs"])]
    np.savez(
        out, predicted=predicted.numpy(), loss=float(loss), mae=evaluated["mean_absolute_error"], rates=rates, **found
    )


if __name__ == "__main__":
    main()
