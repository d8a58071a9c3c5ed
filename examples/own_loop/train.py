"""Train a small image classifier, on one process or, with torchrun, on several: a loop as it stands in many repositories."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mlhpc


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def load_data(path, batch_size):
    sets = {}
    for name in ("train", "val"):
        file = np.load(path / f"{name}.npz")
        sets[name] = TensorDataset(torch.from_numpy(file["images"]), torch.from_numpy(file["kinds"]))
    sampler = DistributedSampler(sets["train"]) if world_size() > 1 else None
    loader = DataLoader(sets["train"], batch_size // world_size(), sampler=sampler, shuffle=sampler is None)
    return loader, DataLoader(sets["val"], 100), sampler


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 3),
    )  # fmt: skip


def train_one_epoch(model, criterion, optimizer, loader):
    model.train()
    for image, target in run.batches(loader):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


def evaluate(model, loader):
    model.eval()
    with torch.inference_mode():
        right = sum((model(image).argmax(1) == target).sum().item() for image, target in loader)
    return right / len(loader.dataset)


def main(args):
    torch.manual_seed(run.seed)
    loader, val_loader, sampler = load_data(args.data_path, args.batch_size)
    model = build_model()
    if world_size() > 1:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    run.start(model, optimizer, train_samples=len(loader.dataset), eval_samples=len(val_loader.dataset))
    for epoch in range(args.epochs):
        run.epoch()
        if sampler is not None:
            sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, loader)
        scheduler.step()
        accuracy = evaluate(model, val_loader)
        if run.evaluation(accuracy):
            break


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    args = get_args()
    used = {"opt_name": "sgd", "opt_base_learning_rate": args.lr, "sgd_opt_momentum": args.momentum}
    config = {"size": "smoke", "global_batch_size": args.batch_size, "max_epochs": args.epochs, "hyperparameters": used}
    with mlhpc.Run(Path(__file__).with_name("card.yaml"), config, data=args.data_path, output="runs/shapes") as run:
        run.init_process_group()
        main(args)
