"""A DataProto by hand: chunk, concat, union. Needs ostinato-protocol and no GPU."""

import torch

from ostinato.protocol import DataProto

data = DataProto.from_dict(
    tensors={"input_ids": torch.arange(32).reshape(8, 4)},
    non_tensors={"answer": [str(i) for i in range(8)]},  # plain lists are taken
    meta_info={"temperature": 1.0},
)
parts = data.chunk(4)
print([p.batch["input_ids"].shape for p in parts])
back = DataProto.concat(parts)
print(back.batch["input_ids"].shape, back.non_tensor_batch["answer"][:3])
merged = back.union(DataProto.from_dict(tensors={"reward": torch.ones(8)}))
print(list(merged.batch.keys()))
