"""Asynchronous operators: `async_op=True`, `after=` and `Work`.

Three kinds of tests: results on the CPU and on GPUs; which stream waits for which, with recorded streams in place of
those of a GPU; and what only a GPU shows, such as memory that is reused too early.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_ep
from fake_streams import Cuda, Event, Stream, cuda, on_streams
from hybrid_ep import Buffer, CallerError, Dispatched, PeerError, Work
from test_buffer import combine, dispatch, inputs
from worlds import make_case, world

__all__ = ["cuda"]  # a fixture

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PADS = [None, 4]
CAPACITY = 64


# ---- results


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("capacity", [None, CAPACITY])
def test_results_and_gradients_equal_those_of_synchronous_operators(
    device: str, pad: int | None, capacity: int | None
) -> None:
    case = make_case(ranks=2, experts=4)

    def step(buffer: Buffer, pattern: tuple[bool, bool]) -> list[Tensor]:
        x, idx, weights = inputs(case, buffer)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        got: Any = dispatch(buffer, pad, x, idx, weights, capacity=capacity, async_op=pattern[0])
        if pattern[0]:
            got, work = got
            work.wait()
        assert got.probs is not None
        rows = got.tokens.sin() * (got.probs[:, None] if pad else got.probs.sum(1, keepdim=True))
        back: Any = combine(buffer, pad, rows, got.handle, probs=got.probs, async_op=pattern[1])
        if pattern[1]:
            back, work = back
            with work:
                pass
        assert back.probs is not None
        (back.tokens.square().sum() + 3 * back.probs.square().sum()).backward()
        assert x.grad is not None and weights.grad is not None
        return [t.detach().cpu() for t in (back.tokens, back.probs, x.grad, weights.grad)]

    def work_of(buffer: Buffer) -> list[list[Tensor]]:
        patterns = [(False, False), (True, True), (True, False), (False, True)]
        return [step(buffer, pattern) for pattern in patterns]

    for expected, *others in world(work_of, 2, device=device, experts=4):
        for found in others:
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


def test_a_handle_of_an_asynchronous_preprocess(device: str) -> None:
    case = make_case(ranks=2, experts=4)

    @torch.no_grad()
    def work_of(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)
        handle, prepared = buffer.preprocess(idx, weights, pad_multiple=4, capacity=CAPACITY, async_op=True)
        # No wait in between: the operators of a buffer run in call order.
        got, sent = buffer.dispatch_with_permute(x, handle=handle, topk_weights=weights, async_op=True, after=prepared)
        back, returned = buffer.combine_with_unpermute(got.tokens, handle, async_op=True, after=sent)
        returned.wait()
        assert torch.equal(back.tokens, buffer.combine_with_unpermute(got.tokens, handle).tokens)
        returned.synchronize()
        assert prepared.is_completed() and sent.is_completed() and returned.is_completed()

    world(work_of, 2, device=device, experts=4)


def test_on_the_cpu_an_operator_is_complete_when_the_call_returns() -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device="cpu")
    x, idx = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    got, work = buffer.dispatch(x, idx, async_op=True)
    assert isinstance(work, Work) and hybrid_ep.Work is Work
    assert work.is_completed() and work.event is None
    assert torch.equal(got.tokens, x)
    work.wait()
    work.synchronize()
    with pytest.raises(KeyError), work:
        raise KeyError


def test_errors_on_the_cpu_are_raised_by_the_call() -> None:
    def work_of(buffer: Buffer) -> None:
        if buffer.rank == 1:
            buffer.close()
            return
        with pytest.raises(PeerError, match="left"):
            buffer.dispatch(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), async_op=True)

    world(work_of, 2)


def test_arguments() -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device="cpu")
    x, idx = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    _, work = buffer.dispatch(x, idx, async_op=True)
    with pytest.raises(CallerError, match="after: expected with async_op=True only"):
        buffer.dispatch(x, idx, after=work)  # type: ignore[call-overload]
    with pytest.raises(CallerError, match=r"after: expected a torch.cuda.Event or a Work, found int"):
        buffer.dispatch(x, idx, async_op=True, after=3)  # type: ignore[call-overload]
    with pytest.raises(CallerError, match="tokens: expected 2 dimensions"):
        buffer.dispatch(x[0], idx, async_op=True)
    got, _ = buffer.dispatch(x, idx, async_op=True, after=work)
    assert torch.equal(got.tokens, x)


def test_a_compiled_graph_breaks_at_an_asynchronous_operator(device: str) -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device=device)

    def layer(x: Tensor, idx: Tensor) -> Tensor:
        got, work = buffer.dispatch_with_permute(x * 2, idx, capacity=16, async_op=True)
        with work:
            shared = x.sin()
        back, work = buffer.combine_with_unpermute(got.tokens + 1, got.handle, async_op=True)
        work.wait()
        return back.tokens + shared

    x, idx = torch.randn(3, 8, device=device), torch.arange(3, device=device)[:, None]
    torch._dynamo.reset()
    for _ in range(2):
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x, idx), layer(x, idx))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_start"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, idx)
    torch._dynamo.reset()


# ---- which stream waits for which


def sample(tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    case = make_case(ranks=1, experts=4, topk=2, tokens=[tokens])
    return case.tokens[0], case.topk_idx[0], case.topk_weights[0]


def test_the_operator_waits_for_the_current_stream_and_wait_for_the_operator(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    cuda.launch("producer")
    got, work = buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True)
    (communication,) = cuda.streams
    assert communication.priority == -1
    assert cuda.current is cuda.default
    assert cuda.stream_of["preprocess 0"] is cuda.stream_of["dispatch 1"] is communication
    assert {"producer", "preprocess 0"} <= cuda.before["dispatch 1"]
    cuda.launch("beside")
    work.wait()
    cuda.launch("consumer")
    assert "dispatch 1" not in cuda.before["beside"]
    assert "dispatch 1" in cuda.before["consumer"]
    buffer.combine(got.tokens, got.handle, async_op=True)
    assert cuda.streams == [communication]
    assert cuda.stream_of["combine 2"] is communication and "consumer" in cuda.before["combine 2"]


def test_wait_applies_to_the_stream_that_is_current_then(cuda: Cuda) -> None:
    buffer, other = on_streams(cuda), Stream()
    _, work = buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True)
    with cuda.stream(other):
        work.wait()
    assert "dispatch 1" in other.done and "dispatch 1" not in cuda.default.done
    work.wait()
    assert "dispatch 1" in cuda.default.done


def test_as_a_context_manager_the_stream_waits_at_the_end_of_the_block(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    for error in (None, KeyError):
        _, work = buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True)
        (name,) = [name for name in cuda.streams[0].done - cuda.default.done if name.startswith("dispatch")]
        try:
            with work:
                cuda.launch(f"beside {name}")
                if error is not None:
                    raise error
        except KeyError:
            pass
        assert name not in cuda.before[f"beside {name}"] and name in cuda.default.done


def test_every_input_and_output_is_recorded_in_both_streams_unless_it_was_delivered(cuda: Cuda) -> None:
    """PyTorch's allocator does not own what dispatch delivers; with `cudaMallocAsync`, it raises an internal error."""
    buffer = on_streams(cuda)
    x, idx, weights = sample()
    got, sent = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY, async_op=True)
    assert got.probs is not None and got.tokens_per_expert is not None
    back, returned = buffer.combine_with_unpermute(got.tokens, got.handle, probs=got.probs, async_op=True)
    assert back.probs is not None
    (communication,) = cuda.streams
    made = [got.overflow, got.tokens_per_expert, got.handle.kept_per_expert, back.tokens, back.probs]
    assert {t.data_ptr() for t in (x, idx, weights)} <= cuda.recorded_in(communication)
    assert {t.data_ptr() for t in made} <= cuda.recorded_in(cuda.default)
    # A stream that waits may use the results, too.
    other = Stream()
    with cuda.stream(other):
        sent.wait()
        returned.wait()
    assert {t.data_ptr() for t in made} <= cuda.recorded_in(other)
    # Delivered memory is not recorded even if another buffer takes it.
    rows = buffer.empty(5, 8, dtype=torch.float32)
    on_streams(cuda).dispatch(rows[1:], idx[1:], capacity=CAPACITY, async_op=True)
    delivered = {t.data_ptr() for t in (got.tokens, got.probs, rows[1:])}
    assert not delivered & {address for address, _ in cuda.recorded}


@pytest.mark.parametrize("allocator", ["native", "cudaMallocAsync"])
def test_cuda_malloc_async_refuses_to_record_memory_of_other_libraries(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    buffer = on_streams(cuda)
    x, idx, _ = sample()
    record = Tensor.record_stream

    def refuses(tensor: Tensor, stream: Stream) -> None:
        if tensor.data_ptr() == x.data_ptr():
            raise RuntimeError("INTERNAL ASSERT FAILED: ptr not found in ptr_info")
        record(tensor, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(Tensor, "record_stream", refuses)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    if allocator == "native":
        with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
            buffer.dispatch(x, idx, capacity=CAPACITY, async_op=True)
        return
    got, work = buffer.dispatch(x, idx, capacity=CAPACITY, async_op=True)
    work.wait()
    assert torch.equal(got.tokens[:5], x)
    assert idx.data_ptr() in cuda.recorded_in(cuda.streams[0])


def test_the_first_stream_that_waits_is_recorded_also_after_later_calls(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    x, idx, weights = sample()
    got, sent = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY, async_op=True)
    assert got.tokens_per_expert is not None
    made = {got.overflow.data_ptr(), got.tokens_per_expert.data_ptr(), got.handle.kept_per_expert.data_ptr()}
    # This call waits for the dispatch itself.
    buffer.combine_with_unpermute(got.tokens, got.handle)
    first, second = Stream(), Stream()
    with cuda.stream(first):
        sent.wait()
    assert made <= cuda.recorded_in(first)
    # After that, the work no longer keeps the results.
    with cuda.stream(second):
        sent.wait()
    assert not cuda.recorded_in(second)


def test_a_work_keeps_the_results_until_the_first_wait_or_its_end(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    for waits in (False, True):
        got, work = buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True)
        buffer.combine(got.tokens, got.handle)
        del got
        results = [weakref.ref(tensor) for tensor in work._results]
        assert results and all(result() is not None for result in results)
        if waits:
            work.wait()
        else:
            del work
        assert all(result() is None for result in results)


def test_copies_that_the_operator_makes_are_made_in_its_stream(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, clone = on_streams(cuda), Tensor.clone
    x, idx, _ = sample()

    def launched(tensor: Tensor, **options: Any) -> Tensor:
        cuda.launch("clone")
        return clone(tensor, **options)

    monkeypatch.setattr(Tensor, "clone", launched)
    buffer.dispatch(x.t().contiguous().t(), idx, capacity=CAPACITY, async_op=True)
    assert cuda.stream_of["clone"] is cuda.streams[0]


@pytest.mark.parametrize("capturing", [False, True])
def test_operators_run_in_call_order(cuda: Cuda, capturing: bool) -> None:
    """Even without a `wait`, and with `after` in place of the current stream."""
    buffer = on_streams(cuda)
    x, idx, _ = sample()
    handle = buffer.preprocess(idx, pad_multiple=1, capacity=CAPACITY)
    early = cuda.default.record_event()
    cuda.capturing = capturing
    # Keeps the results: if memory were freed, an operator with `after` would wait for the current stream.
    kept: list[Any] = []
    for pattern in (0b0110, 0b1001, 0b0101, 0b1011):
        for bit in range(4):
            if pattern >> bit & 1:
                after = early if bit == 3 and capturing else None
                kept.append(buffer.dispatch_with_permute(x, handle=handle, async_op=True, after=after))
            else:
                kept.append(buffer.dispatch_with_permute(x, handle=handle))
    names = list(cuda.before)
    assert len(names) == 17
    for at, name in enumerate(names):
        assert set(names[:at]) <= cuda.before[name]


def test_after_takes_the_place_of_the_current_stream(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    x, idx, _ = sample()
    handle = buffer.preprocess(idx, capacity=CAPACITY)
    cuda.launch("producer")
    produced = cuda.default.record_event()
    cuda.launch("unrelated")
    got, work = buffer.dispatch(x, handle=handle, async_op=True, after=produced)
    assert "producer" in cuda.before["dispatch 1"] and "unrelated" not in cuda.before["dispatch 1"]
    with cuda.stream(Stream()):
        cuda.launch("elsewhere")
        elsewhere = cuda.current.record_event()
    buffer.combine(got.tokens, handle, async_op=True, after=elsewhere)
    assert "elsewhere" in cuda.before["combine 2"] and "unrelated" not in cuda.before["combine 2"]
    other = on_streams(cuda)
    other.dispatch(x, idx, capacity=CAPACITY, async_op=True, after=work)
    assert "dispatch 1" in cuda.before["preprocess 0"] and "unrelated" not in cuda.before["preprocess 0"]


def test_after_a_work_of_the_cpu_the_operator_follows_the_current_stream(cuda: Cuda) -> None:
    (on_cpu,) = Buffer.threads(1, num_experts=4, device="cpu")
    buffer = on_streams(cuda)
    x, idx, _ = sample()
    handle = buffer.preprocess(idx, capacity=CAPACITY)
    got, complete = on_cpu.dispatch(x, idx, async_op=True)
    cuda.launch("copy to the GPU")
    buffer.dispatch(got.tokens, handle=handle, async_op=True, after=complete)
    assert "copy to the GPU" in cuda.before["dispatch 1"]


def test_an_event_that_was_never_recorded_is_refused(cuda: Cuda) -> None:
    (on_cpu,) = Buffer.threads(1, num_experts=4, device="cpu")
    x, idx, _ = sample()
    event = Event()
    for buffer in (on_streams(cuda), on_cpu):
        with pytest.raises(CallerError, match=r"the event was never recorded: call record\(\) before the operator"):
            buffer.dispatch(x, idx, capacity=CAPACITY, async_op=True, after=event)  # type: ignore[call-overload]
    assert not cuda.before and not cuda.streams


@pytest.mark.parametrize("options", [{}, {"blocking": True}, {"interprocess": True}, {"enable_timing": True}])
def test_an_event_of_pytorch_that_was_never_recorded_is_refused(device: str, options: dict[str, bool]) -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device=device)
    x, idx = torch.randn(3, 8, device=device), torch.zeros(3, 1, dtype=torch.int64, device=device)
    try:
        event = torch.cuda.Event(**options)
    except RuntimeError:
        pytest.skip("this PyTorch has no events")
    with pytest.raises(CallerError, match="the event was never recorded"):
        buffer.dispatch(x, idx, capacity=CAPACITY, async_op=True, after=event)
    if torch.cuda.is_available():
        event.record()
        got, work = buffer.dispatch(x, idx, capacity=CAPACITY, async_op=True, after=event)
        work.wait()
        assert torch.equal(got.tokens[:3], x)


def test_after_does_not_hide_what_the_call_itself_puts_into_the_current_stream(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    x, idx, weights = sample()
    handle = buffer.preprocess(idx, capacity=CAPACITY)
    produced = cuda.default.record_event()
    for calls, name in enumerate(("weights", "probs"), 1):
        cuda.launch(f"converted {name}")
        given: Any = {"topk_weights": weights} if name == "weights" else {"probs": torch.rand(5, 4).double()}
        buffer.dispatch(x, handle=handle, async_op=True, after=produced, **given)
        assert f"converted {name}" in cuda.before[f"dispatch {calls}"]


def test_after_does_not_reuse_delivered_memory_that_the_current_stream_may_read(cuda: Cuda) -> None:
    """The view and the graph of autograd keep the memory; the last of them frees it."""
    buffer = on_streams(cuda)
    x, idx, _ = sample()
    x.requires_grad_()
    handle = buffer.preprocess(idx, pad_multiple=1, capacity=CAPACITY)
    produced = cuda.default.record_event()
    got: Dispatched | None
    got, work = buffer.dispatch_with_permute(x, handle=handle, async_op=True)
    work.wait()
    assert got is not None
    loss, view = (got.tokens * got.tokens).sum(), got.tokens[1:]
    cuda.launch("reads")
    got = None
    with torch.no_grad():
        kept = [buffer.dispatch_with_permute(x, handle=handle, async_op=True, after=produced)]
        del loss
        gc.collect()
        kept.append(buffer.dispatch_with_permute(x, handle=handle, async_op=True, after=produced))
        assert "reads" not in cuda.before["dispatch 2"] | cuda.before["dispatch 3"]
        del view
        kept.append(buffer.dispatch_with_permute(x, handle=handle, async_op=True, after=produced))
        assert "reads" in cuda.before["dispatch 4"]
        cuda.launch("later")
        kept.append(buffer.dispatch_with_permute(x, handle=handle, async_op=True, after=produced))
        assert "later" not in cuda.before["dispatch 5"]


def test_inputs_are_kept_until_a_stream_waits(cuda: Cuda) -> None:
    """Inputs may be registered memory of another buffer, for which `record_stream` does nothing."""
    one, other = on_streams(cuda), on_streams(cuda)
    x, idx, _ = sample()
    for wait in ("itself", "a later one", "a synchronous operator", "the GPU is done"):
        got = one.dispatch(x, idx, capacity=CAPACITY)
        freed: list[int] = []
        kept = weakref.ref(got.tokens.untyped_storage(), lambda _, freed=freed: freed.append(1))
        _, work = other.dispatch(got.tokens, torch.zeros(CAPACITY, 1, dtype=torch.int64), capacity=80, async_op=True)
        del got
        gc.collect()
        assert not freed and kept() is not None
        if wait == "itself":
            work.wait()
        elif wait == "a later one":
            other.dispatch(x, idx, capacity=CAPACITY, async_op=True)[1].wait()
        elif wait == "a synchronous operator":
            other.dispatch(x, idx, capacity=CAPACITY)
        else:
            assert isinstance(work.event, Event)
            work.event.complete = True
            other.dispatch(x, idx, capacity=CAPACITY, async_op=True)
        gc.collect()
        assert freed, wait


def test_backward_runs_in_the_stream_that_was_current_at_the_call(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    x, idx, weights = sample()
    x.requires_grad_()
    got, sent = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY, async_op=True)
    sent.wait()
    back, returned = buffer.combine_with_unpermute(got.tokens.sin(), got.handle, async_op=True)
    returned.wait()
    back.tokens.sum().backward()
    communication = cuda.streams[0]
    assert [name for name, stream in cuda.stream_of.items() if stream is communication] == [
        "preprocess 0", "dispatch 1", "combine 2",
    ]  # fmt: skip
    assert cuda.stream_of["dispatch 3"] is cuda.stream_of["combine 4"] is cuda.default


def test_registered_memory_for_the_caller_is_not_that_of_a_running_operator(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True)
    buffer.empty(4, dtype=torch.float32)
    assert "dispatch 1" in cuda.default.done


def test_an_operator_that_fails_leaves_the_streams_as_they_were(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    x, idx, _ = sample()
    for cuda.capturing in (False, True):
        handle, _ = buffer.preprocess(idx, capacity=CAPACITY, async_op=True)
        with pytest.raises(CallerError, match="expected 2 dimensions"):
            buffer.dispatch(x[0], handle=handle, async_op=True)
        assert cuda.current is cuda.default
        # A capture must end with all streams joined, so the stream waits for what was launched before the error.
        if cuda.capturing:
            assert cuda.streams[0].done <= cuda.default.done
        buffer.dispatch(x, idx, capacity=CAPACITY)


def test_work_of_a_capture_belongs_to_the_capture(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    cuda.capturing = True
    _, work = buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True)
    for ask in (work.is_completed, work.synchronize):
        with pytest.raises(CallerError, match="runs in replays only"):
            ask()
    work.wait()
    assert "dispatch 1" in cuda.default.done
    cuda.capturing = False
    with pytest.raises(CallerError, match="runs in replays only"):
        work.wait()
    with pytest.raises(CallerError, match="runs in replays only"):
        buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True, after=work)
    buffer.dispatch(*sample(), capacity=CAPACITY)


def test_a_work_from_before_the_capture_does_not_bring_the_communication_stream_into_it(cuda: Cuda) -> None:
    one, other = on_streams(cuda), on_streams(cuda)
    x, idx, _ = sample()
    _, work = one.dispatch(x, idx, capacity=CAPACITY, async_op=True)
    cuda.capturing = True
    cuda.launch("captured")
    with pytest.raises(CallerError, match=r"call wait\(\) before the capture"):
        other.dispatch(x, idx, capacity=CAPACITY, async_op=True, after=work)
    # A stream in the capture that does not leave it would end the capture with an error of CUDA.
    assert "captured" not in cuda.streams[1].done


@pytest.mark.parametrize("async_op", [False, True])
def test_a_capture_is_refused_while_no_stream_waits_for_an_earlier_operator(cuda: Cuda, async_op: bool) -> None:
    buffer = on_streams(cuda)
    _, work = buffer.dispatch(*sample(), capacity=CAPACITY, async_op=True)
    cuda.capturing = True
    with pytest.raises(CallerError, match=r"call wait\(\) on their Work before the capture"):
        dispatch(buffer, None, *sample(), capacity=CAPACITY, async_op=async_op)
    with pytest.raises(CallerError, match=r"call wait\(\) before the capture"):
        work.wait()
    cuda.capturing = False
    work.wait()
    cuda.capturing = True
    dispatch(buffer, None, *sample(), capacity=CAPACITY, async_op=async_op)


def test_a_call_of_another_thread_is_not_part_of_an_asynchronous_call(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    communication = buffer._end.communication
    assert communication is not None
    with communication.call(buffer._end, None, ()), ThreadPoolExecutor(1) as other:
        assert communication.run(lambda _: [cuda.current], buffer._end)[0] is not cuda.default
        assert other.submit(communication.run, lambda _: [cuda.current], buffer._end).result()[0] is cuda.default


def test_a_synchronous_program_touches_no_stream(cuda: Cuda) -> None:
    buffer = on_streams(cuda)
    got = buffer.dispatch(*sample(), capacity=CAPACITY)
    buffer.combine(got.tokens, got.handle)
    assert not cuda.streams and not cuda.recorded and not cuda.asked


# ---- what only a GPU shows


@on_gpu
def test_the_operator_runs_beside_the_current_stream() -> None:
    def work_of(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)
        handle = buffer.preprocess(idx, weights, pad_multiple=4, capacity=CAPACITY)
        expected = buffer.dispatch_with_permute(x, handle=handle).tokens.clone()
        torch.cuda.synchronize()
        got, work = buffer.dispatch_with_permute(x, handle=handle, async_op=True)
        torch.cuda._sleep(1_000_000_000)
        beside = torch.cuda.current_stream().record_event()
        assert work.event is not None
        work.event.synchronize()
        assert work.is_completed() and not beside.query()
        work.wait()
        assert torch.equal(got.tokens[:4], expected[:4])

    case = make_case(ranks=1, experts=4)
    world(work_of, 1, device="cuda", experts=4)


@on_gpu
def test_tensors_that_are_dropped_before_the_wait_are_not_reused() -> None:
    @torch.no_grad()
    def work_of(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)
        expected = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY).tokens.clone()
        used = int((idx >= 0).sum())
        for _ in range(20):
            # The communication stream starts late, so the inputs are dropped, and their memory is requested, before
            # that.
            torch.cuda._sleep(5_000_000)
            given = [t.clone() for t in (x, idx, weights)]
            ready = torch.cuda.current_stream().record_event()
            got, work = buffer.dispatch_with_permute(*given, capacity=CAPACITY, async_op=True, after=ready)
            del given
            overwritten = [torch.full_like(t, 1) for t in (x, idx, weights) for _ in range(4)]
            work.wait()
            assert torch.equal(got.tokens[:used], expected[:used])
            del overwritten

    case = make_case(ranks=1, experts=4)
    world(work_of, 1, device="cuda", experts=4)


@on_gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_synchronous_and_asynchronous_operators_of_a_job_on_gpus(ranks: int) -> None:
    case = make_case(ranks=ranks, experts=4 * ranks)

    @torch.no_grad()
    def work_of(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)
        expected = x * (weights * (idx >= 0)).sum(1, keepdim=True)
        for turn in range(30):
            got: Any = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY, async_op=turn % 2 == 0)
            if turn % 2 == 0:
                got, sent = got
                sent.wait()
            rows = got.tokens * got.probs[:, None]
            back: Any = buffer.combine_with_unpermute(rows, got.handle, async_op=turn % 3 == 0)
            del rows
            if turn % 3 == 0:
                back, returned = back
                returned.wait()
            torch.testing.assert_close(back.tokens, expected)

    world(work_of, ranks, device="cuda", experts=4 * ranks)


@on_gpu
def test_asynchronous_operators_can_be_captured_and_replayed() -> None:
    case = make_case(ranks=1, experts=4)

    @torch.no_grad()
    def work_of(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)

        def step() -> Tensor:
            got, sent = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY, async_op=True)
            with sent:
                shared = x.sin()
            assert got.probs is not None
            back, returned = buffer.combine_with_unpermute(got.tokens * got.probs[:, None], got.handle, async_op=True)
            returned.wait()
            return back.tokens + shared

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            captured = step()
        for factor in (2.0, -1.5):
            x.mul_(factor)
            graph.replay()
            torch.testing.assert_close(captured, x * (weights * (idx >= 0)).sum(1, keepdim=True) + x.sin())

    world(work_of, 1, device="cuda", experts=4)


@on_gpu
def test_an_invalid_routing_is_reported_by_synchronize() -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device="cuda", timeout=5)
    idx = torch.tensor([[0], [7]], device=buffer.device)
    _, work = buffer.preprocess(idx, pad_multiple=1, capacity=CAPACITY, async_op=True)
    with pytest.raises(CallerError, match="expert index 7 is out of range"):
        work.synchronize()
