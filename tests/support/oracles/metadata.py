"""Plain loops over requests and rows: what the batch bookkeeping must return."""

from collections.abc import Sequence

PAD = -1


def verifier_rows(num_drafts: Sequence[int], ends: Sequence[int]):
    """Lists (logits_indices, target_logits_indices, bonus_logits_indices) of a scheduled step."""
    logits, target, bonus = [], [], []
    for drafts, end in zip(num_drafts, ends, strict=True):
        for row in range(end - drafts - 1, end):
            logits.append(row)
            (target if row < end - 1 else bonus).append(len(logits) - 1)
    return logits, target, bonus


def slot(table_row: Sequence[int], position: int, page_size: int, max_model_len: int) -> int:
    column = position // page_size
    if position >= max_model_len or column >= len(table_row) or table_row[column] < 0:
        return PAD
    return table_row[column] * page_size + position % page_size


def new_slots(lengths, table, positions, rejected, *, page_size, num_new, max_model_len):
    """Lists the slots of requests of `lengths` rows that each got `num_new` more."""
    slots, row = [], 0
    for length, pages in zip(lengths, table, strict=True):
        for _ in range(length + num_new):
            place = slot(pages, positions[row], page_size, max_model_len)
            slots.append(PAD if rejected[row] else place)
            row += 1
    return slots


def follow(computed, accepted, previous, valid, drafted, host):
    """Lists (computed, accepted) of a batch whose requests sat at `previous` rows before."""
    new_computed, new_accepted = list(host), list(accepted)
    for row, before in enumerate(previous):
        if 0 <= before < len(drafted) and drafted[before] > 0:
            new_computed[row] = computed[before] + valid[before]
            new_accepted[row] = valid[before]
    return new_computed + list(computed[len(host) :]), new_accepted


def kept_rows(lengths, num_sampled, num_drafts):
    """Lists (row of each kept token, rows kept a request) after rejected drafts are taken out."""
    rows, num_kept, start = [], [], 0
    for length, sampled, drafts in zip(lengths, num_sampled, num_drafts, strict=True):
        rejected = drafts + 1 - sampled if drafts else 0
        rows += range(start, start + length - rejected)
        num_kept.append(length - rejected)
        start += length
    return rows, num_kept


def first_pass(requests, *, num_slots: int, shift: bool, mask_token: int):
    """Lays out a first pass with added rows.

    Args:
      requests: (token ids, first position, rejected rows, next token) of each.

    Returns:
      Rows of (token id, position, rejected, masked), and for each row the place of its request's
      row whose hidden state it gets (None for masked rows and those behind), and the sampled rows.
    """
    rows, sources, sampled = [], [], []
    for ids, position, rejected, next_token in requests:
        kept = ids[1 if shift else 0 : len(ids) - rejected]
        of_request = [(token, False, False) for token in kept]
        first = len(rows) + len(kept)
        sampled.append(list(range(first, first + num_slots)))
        of_request.append((next_token, False, False))
        of_request += [(mask_token, False, True)] * (num_slots - 1)
        of_request += [(0, True, False)] * rejected
        for place, (token, is_rejected, is_masked) in enumerate(of_request):
            rows.append((token, 0 if is_rejected else position + place, is_rejected, is_masked))
            sources.append(None if is_masked or place >= len(ids) else place)
    return rows, sources, sampled
