"""Writes `torch_sample.ckpt`, a file of hidden states as SpecForge's writer leaves it. Needs torch.

    python tests/golden/make_torch_sample.py

T = 6 tokens, D = 32, two taps. The ids are a slice of a longer storage and one state is stored transposed, so that a
reader that ignores offsets or strides reads other numbers.
"""

from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

T, D = 6, 32


def main() -> None:
    aux = torch.arange(T * 2 * D, dtype=torch.float32).reshape(T, 2 * D) / 64
    last = torch.arange(T * D, dtype=torch.float32).reshape(D, T).T / -32
    record = {
        "input_ids": torch.arange(100, 120)[4 : 4 + T],
        "loss_mask": torch.tensor([0, 0, 1, 1, 0, 1]),
        "hidden_state": last.to(torch.bfloat16).unsqueeze(0),
        "aux_hidden_state": aux.to(torch.bfloat16).unsqueeze(0),
    }
    assert not record["hidden_state"].is_contiguous()
    torch.save(record, Path(__file__).parent / "torch_sample.ckpt")


if __name__ == "__main__":
    main()
