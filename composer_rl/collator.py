"""Puts what the channels need into TRL's batch, row-aligned: tensors whose first dimension is the rollout.

GRPOTrainer shuffles and splits such tensors with the rows (shuffle_sequence_dict, split_tensor_dict); anything else
never reaches the loss.
"""

from collections.abc import Sequence

import torch

from composer_rl.channels.sdpo import TeacherRow

# No token: the entries that only fill a tensor.
SENTINEL = -1


def collate_teacher_rows(
    rows: Sequence[Sequence[TeacherRow]], facts: Sequence[Sequence[float]], pad_token_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the teacher rows of B rollouts as tensors, padded to K rows per rollout.

    ctx_teacher_input_ids, ctx_teacher_attention_mask: (B, K, L), padded on the right; a place without a row has an
    empty mask. student_response_idx: (B, K, T) index of each token among the completion's; teacher_response_idx:
    (B, K, T) position in the teacher row that predicts it; SENTINEL and a False student_response_valid /
    teacher_response_valid where there is no token. sdpo_loss_mask: (B, K, T), True where the token is distilled.
    sdpo_facts: (B, len(FACTS)).
    """
    most = max(1, *(len(of_rollout) for of_rollout in rows)) if rows else 1
    length = max((len(row.ids) for of_rollout in rows for row in of_rollout), default=1)
    tokens = max((len(row.student) for of_rollout in rows for row in of_rollout), default=1)
    shape = (len(rows), most)
    ids = torch.full((*shape, length), pad_token_id)
    mask = torch.zeros((*shape, length), dtype=torch.bool)
    student = torch.full((*shape, tokens), SENTINEL)
    teacher = torch.full((*shape, tokens), SENTINEL)
    distilled = torch.zeros((*shape, tokens), dtype=torch.bool)
    for rollout, of_rollout in enumerate(rows):
        for place, row in enumerate(of_rollout):
            ids[rollout, place, : len(row.ids)] = torch.tensor(row.ids)
            mask[rollout, place, : len(row.ids)] = True
            count = len(row.student)
            student[rollout, place, :count] = torch.tensor(row.student)
            teacher[rollout, place, :count] = torch.tensor(row.teacher)
            distilled[rollout, place, :count] = torch.tensor(row.distilled)
    valid = student != SENTINEL
    batch = {
        "ctx_teacher_input_ids": ids,
        "ctx_teacher_attention_mask": mask,
        "student_response_idx": student,
        "student_response_valid": valid,
        "teacher_response_idx": teacher,
        "teacher_response_valid": valid.clone(),
        "sdpo_loss_mask": distilled,
        "sdpo_facts": torch.tensor(facts),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}
