"""Recorded requests, replayed: the counts of a plain loop, segments, bad lines, the command."""

import json
import re

import pytest

import jspec
from jspec import cli
from jspec.proposers import REGISTRY, find
from jspec.runtime import replay
from jspec.runtime.replay import Record, Tally, read_records, winner
from tests.support.oracles import ngram as oracle

pytestmark = pytest.mark.usefixtures("own_cache")

LOOKUP = dict(num_drafts=3, prompt_lookup_min=1, prompt_lookup_max=3)
LONGEST = 60


def recorded(rng, count, vocabulary=4):
    """Requests that repeat themselves, of any length, in two segments."""
    for i in range(count):
        prompt = rng.integers(0, vocabulary, rng.integers(1, 20)).tolist()
        output = rng.integers(0, vocabulary, rng.integers(0, 40)).tolist()
        yield Record(prompt, output, segment="ab"[i % 2])


def counted(records):
    """What a plain loop over the definition counts."""
    tally = Tally()
    for record in records:
        tally.num_requests += 1
        tokens, known = [*record.prompt, *record.output], len(record.prompt) + 1
        while known < len(tokens):
            drafts = oracle.draft(tokens[:known], num_drafts=3, min_n=1, max_n=3)
            accepted = 0
            while known + accepted < len(tokens) and accepted < len(drafts):
                if drafts[accepted] != tokens[known + accepted]:
                    break
                accepted += 1
            is_cut = known + accepted == len(tokens)  # the record ends with an accepted draft
            accepted -= is_cut
            known += accepted + 1
            tally.num_steps += 1
            tally.num_tokens += accepted + 1
            tally.num_drafted_steps += bool(drafts)
            tally.num_draft_tokens += accepted if is_cut else len(drafts)
            tally.num_accepted_tokens += accepted
    return tally


def counts(tally):
    return {name: value for name, value in vars(tally).items() if name != "draft_seconds"}


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_a_replay_counts_what_a_plain_loop_counts(method, rng):
    records = list(recorded(rng, 12))
    tallies = replay.replay(records, find(method).Config(**LOOKUP), max_model_len=LONGEST)
    assert list(tallies) == ["all", "a", "b"]
    assert counts(tallies["all"]) == counts(counted(records))
    assert counts(tallies["a"]) == counts(counted(records[::2]))
    assert counts(tallies["b"]) == counts(counted(records[1::2]))
    assert tallies["all"].draft_seconds == pytest.approx(
        tallies["a"].draft_seconds + tallies["b"].draft_seconds
    )
    assert tallies["all"].num_accepted_tokens > 20  # the records do repeat themselves
    for tally in tallies.values():
        assert tally.num_tokens == tally.num_steps + tally.num_accepted_tokens


def test_how_many_requests_run_together_changes_no_count(rng):
    records, config = list(recorded(rng, 10)), jspec.NgramConfig(**LOOKUP)
    alone, together = (
        replay.replay(records, config, max_model_len=LONGEST, max_requests=n)["all"] for n in (1, 5)
    )
    assert counts(alone) == counts(together)


def test_records_are_taken_only_as_slots_get_free():
    ended_when_taken = []
    tallies = {}

    def source():
        for _ in range(4):
            ended_when_taken.append(tallies["all"].num_steps if tallies else 0)
            yield Record([1], [2, 3, 4])

    cache = jspec.CacheConfig(num_pages=1, page_size=9, max_model_len=9)
    state = jspec.init(jspec.NgramConfig(**LOOKUP), cache=cache, max_requests=2)
    run, waiting = replay._Replay(state), source()
    tallies = run.tallies
    while run.admit(waiting, 9):
        run.step()
    assert ended_when_taken == [0, 0, 4, 4]  # two steps each of the first two requests


@pytest.mark.parametrize("output, steps, tokens", [([], 0, 0), ([4], 0, 0), ([4, 5], 1, 1)])
def test_the_first_token_is_of_no_step_and_no_draft(output, steps, tokens):
    record = Record([1, 2, 3], output)
    tally = replay.replay([record], jspec.NgramConfig(**LOOKUP), max_model_len=8)["all"]
    assert (tally.num_requests, tally.num_steps, tally.num_tokens) == (1, steps, tokens)
    assert tally.acceptance_length == 1.0 and tally.acceptance_rate == 0.0


@pytest.mark.parametrize(
    "output, tokens, drafted, accepted",
    [
        ([2, 3], 1, 0, 0),  # 3 4 5 are drafted, and the record ends with the first
        ([2, 3, 4], 2, 1, 1),
        ([2, 3, 4, 5], 3, 2, 2),
        ([2, 3, 4, 5, 9], 4, 3, 3),
        ([2, 9], 1, 3, 0),
    ],
)
def test_drafts_from_the_last_token_of_a_record_on_count_nowhere(output, tokens, drafted, accepted):
    record = Record([1, 2, 3, 4, 5, 1], output)
    tally = replay.replay([record], jspec.NgramConfig(**LOOKUP), max_model_len=11)["all"]
    assert (tally.num_steps, tally.num_drafted_steps, tally.num_tokens) == (1, 1, tokens)
    assert (tally.num_draft_tokens, tally.num_accepted_tokens) == (drafted, accepted)


def test_a_segment_called_all_is_counted_once():
    record = Record([1], [2, 3], segment="all")
    tallies = replay.replay([record], jspec.NgramConfig(**LOOKUP), max_model_len=8)
    assert list(tallies) == ["all"] and tallies["all"].num_steps == 1


def test_a_record_that_is_too_long_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="9 tokens.*max_model_len.*8"):
        replay.replay([Record([1] * 5, [2] * 4)], jspec.NgramConfig(**LOOKUP), max_model_len=8)
    with pytest.raises(ValueError, match="max_requests.*0"):
        replay.replay([], jspec.NgramConfig(**LOOKUP), max_model_len=8, max_requests=0)


def test_the_longest_acceptance_wins_and_of_equals_the_cheaper():
    def tally(tokens, seconds, accepted=1):
        return Tally(
            num_steps=10, num_tokens=tokens, num_accepted_tokens=accepted, draft_seconds=seconds
        )

    assert winner({"a": tally(12, 1.0), "b": tally(15, 9.0)}) == "b"
    assert winner({"a": tally(15, 2.0), "b": tally(15, 1.0)}) == "b"
    assert winner({"a": tally(10, 1.0, accepted=0)}) is None


def test_the_drafters_without_weights_start_without_any():
    names = replay.model_free()
    assert {"ngram", "ngram_gpu"} <= set(names) <= set(REGISTRY)
    for name in names:
        config = find(name).Config.tiny()
        jspec.init(config, cache=jspec.CacheConfig(num_pages=1, max_model_len=16), max_requests=1)


# Files.


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "requests.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return path

    return write


def test_records_are_read_line_by_line(write):
    path = write(
        {"prompt": [1], "output": [2], "model": "x"}, "", {"prompt": [1], "output": []}, "["
    )
    records = read_records(path)
    assert next(records) == Record([1], [2]) and next(records) == Record([1], [])
    with pytest.raises(ValueError, match="requests.jsonl, line 4: no JSON"):
        next(records)


@pytest.mark.parametrize(
    "line, words",
    [
        ("[" + "1" * 5000 + "]", "no JSON.*4300 digits"),
        ("nonsense", 'no JSON.*wanted an object like {"prompt"'),
        ([1, 2], "a list, wanted"),
        ({"prompt": [1]}, r"keys \['prompt'\], wanted"),
        ({"prompt": "abc", "output": []}, "`prompt` holds 'abc'.*tokenizer"),
        ({"prompt": [1], "output": [2, -1]}, "`output` holds -1.*from 0 on"),
        ({"prompt": [1], "output": [None]}, "`output` holds None"),
        ({"prompt": [True], "output": []}, "`prompt` holds True"),
        ({"prompt": [2.0], "output": []}, "`prompt` holds 2.0"),
        ({"prompt": [2**31], "output": []}, "`prompt` holds 2147483648"),
        ({"prompt": [], "output": [1]}, "`prompt` is empty"),
        ({"prompt": [1], "output": [1], "segment": 7}, "`segment` is 7, wanted a string"),
    ],
)
def test_a_bad_line_is_named_by_its_number(write, line, words):
    path = write({"prompt": [1], "output": [2]}, line)
    with pytest.raises(ValueError, match=f"line 2: {words}"):
        list(read_records(path))


# The command.


COPY = {"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], "output": [3, 4, 5, 6, 7, 8], "segment": "copy"}
CHAT = {"prompt": [1, 2, 3], "output": [4, 5, 6]}


def test_the_table_names_the_winner_of_each_segment(write, capfd):
    words = ["--method", "ngram", "--num-drafts", "3", "--max-requests", "2"]
    assert cli.main(["bench-drafts", str(write(COPY, CHAT)), *words]) == 0
    out = capfd.readouterr().out
    assert re.findall(r"^(\w+): (\d+) requests, (\d+)", out, re.MULTILINE) == [
        ("all", "2", "7"),
        ("copy", "1", "5"),
    ]
    assert out.count("winner: ngram") == 2
    assert re.search(r"ngram +2\.50 +100% +100%", out)  # copy: 3 | 4 5 6 7 | 8


def test_json_has_every_drafter_without_weights_in_every_segment(write, capfd):
    assert cli.main(["bench-drafts", str(write(CHAT, COPY, CHAT)), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert list(result["segments"]) == ["all", "copy"]
    for segment in result["segments"].values():
        assert list(segment["drafters"]) == replay.model_free()
        for numbers in segment["drafters"].values():
            assert set(numbers) == {
                "acceptance_length",
                "acceptance_rate",
                "drafted_share",
                "draft_us_per_token",
            }
    assert result["segments"]["copy"]["winner"] in replay.model_free()


@pytest.mark.parametrize(
    "lines, words, message",
    [
        ([COPY, {"prompt": [1]}], [], "line 2: keys"),
        ([""], [], "holds no request"),
        ([COPY], ["--method", "ngrm"], "ngram"),
        ([COPY], ["--num-drafts", "0"], "num_drafts"),
        ([COPY], ["--min-n", "5", "--max-n", "4"], "5.*4"),
        ([COPY], ["--method", "ngram", "--min-prob", "0.2"], "--min-prob has no effect"),
        ([COPY], ["--max-requests", "0", "--method", "ngram"], "max_requests"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(write, capfd, lines, words, message):
    assert cli.main(["bench-drafts", str(write(*lines)), *words]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.search(f"^jspec: .*{message}", captured.err)


@pytest.mark.parametrize("path", ["nowhere.jsonl", "/dev/null"])
def test_what_cannot_be_read_twice_is_refused_by_name(path, capfd):
    assert cli.main(["bench-drafts", path]) == 1
    assert f"{path} is no file" in capfd.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": [1], "output": [2]}\r\n')
    assert list(replay.read_records(file)) == [replay.Record([1], [2])]


def test_a_file_that_is_no_text_is_refused_at_its_first_line(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match="line 1: no JSON"):
        list(read_records(tmp_path / "binary"))


def test_a_method_that_needs_weights_is_refused(write, capfd, monkeypatch):
    needy = find("ngram")._replace(name="needy", init_params=dict)
    monkeypatch.setitem(REGISTRY, "needy", needy)
    assert cli.main(["bench-drafts", str(write(COPY)), "--method", "needy"]) == 1
    assert "without weights draft ngram, ngram_gpu, suffix" in capfd.readouterr().err
