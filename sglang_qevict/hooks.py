"""Everything of SGLang that is hooked rather than registered, and why.

Each hook does nothing unless tiering is on. That they exist in the SGLang at hand is
checked in the scheduler before it serves, since SGLang only logs a hook that fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from qevict_tiers.budget import WindowBudget
from sglang_qevict import arguments
from sglang_qevict.admission import consider, continue_prompt, project_running
from sglang_qevict.capacity import plan_capacity
from sglang_qevict.fairness import FairPrefillBudget, Turns
from sglang_qevict.flags import add_flags
from sglang_qevict.live.look import LOOK, look_at_scheduler
from sglang_qevict.refusals import refused_kv_dtype, refused_prompt, refused_request
from sglang_qevict.runtime import config_of, runtime
from sglang_qevict.tenants import DEFAULT as DEFAULT_TENANT
from sglang_qevict.tenants import tenant_of

logger = logging.getLogger(__name__)

__all__ = [
    "APP_PATH_VARIABLE",
    "HOOKS",
    "HTTP_HOOKS",
    "LAUNCHER_HOOKS",
    "register_hooks",
    "require_hooks",
]

APP_PATH_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
"""By which SGLang's tokenizer workers import their HTTP server."""

_CPU_RUNNING_REQUESTS = 64
_RUNNING_REQUESTS = 256
"""Requests at once where the user sets no --max-running-requests: their views take bytes."""


def add_cli_args(result: None, parser: Any) -> None:
    """SGLang's parser learns the flags."""
    add_flags(parser, when_on=_require_hooks_or_exit)


def from_cli_args(server_args: Any, cls: Any, args: Any) -> Any:
    """The parsed flags ride on SGLang's record to every process."""
    arguments.apply_command_line(server_args, vars(args))
    if config_of(server_args) is not None:
        arguments.check_port(server_args)
        _register(LAUNCHER_HOOKS)
    _register(HTTP_HOOKS)
    HookRegistry.apply_hooks()
    return server_args


def launch_scheduler_processes(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A launcher ends with the status of a scheduler that refused, without a traceback."""
    result, processes = original(*args, **kwargs)
    wait_for_ready = result.wait_for_ready

    def wait_or_exit() -> None:
        try:
            wait_for_ready()
        except RuntimeError:
            if any(process.exitcode == arguments.REFUSED_STATUS for process in processes or ()):
                raise SystemExit(arguments.REFUSED_STATUS) from None
            raise

    result.wait_for_ready = wait_or_exit
    return result, processes


def config_from_budget(
    original: Any, configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """SGLang's KV bytes become logical tokens; the bytes themselves are kept for the pool."""
    pool_config = original(configurator, budget_bytes, cap_tokens=cap_tokens)
    config = config_of(configurator.server_args)
    if config is None:
        return pool_config
    from sglang.srt.runtime_context import get_parallel, get_schedule

    model = configurator.model_config
    geometry = arguments.window_geometry(model, config, get_parallel().attn_tp_size)
    budget = WindowBudget(config, geometry, configurator.layer_info.num_effective_layers)
    schedule = get_schedule()
    wanted = schedule.max_running_requests
    with arguments.refusing(configurator.server_args):
        for sentence in refused_kv_dtype(model.dtype, configurator.kv_cache_dtype):
            raise ValueError(sentence)
        default = _CPU_RUNNING_REQUESTS if configurator.device == "cpu" else _RUNNING_REQUESTS
        runtime.plan = plan_capacity(
            budget,
            total_bytes=pool_config.max_total_num_tokens * budget.token_bytes,
            context_tokens=model.context_len,
            chunk_tokens=schedule.chunked_prefill_size,
            max_running_requests=wanted,
            default_running_requests=default,
            device=torch.device(configurator.device),
            is_watched=runtime.metric_labels is not None,
            mixes_chunks=schedule.enable_mixed_chunk,
        )
    if wanted and runtime.plan.num_rows < wanted:
        logger.warning(
            "--max-running-requests %d is lowered to %d: what is kept about the windows of each "
            "request may take 5 %% of the KV bytes; a smaller --context-length allows more",
            wanted,
            runtime.plan.num_rows,
        )
    return replace(pool_config, max_total_num_tokens=runtime.plan.max_tokens)


def resolve_max_num_reqs(result: int, configurator: Any, token_capacity: int) -> int:
    """No more requests at once than there are views."""
    return min(result, runtime.plan.num_rows) if runtime.plan else result


def get_kv_pool_cls(result: Any, platform: Any, *, kind: str) -> Any:
    """Pools for plain attention are tiered."""
    if not runtime.active or kind != "mha":
        return result
    from sglang_qevict.pool import TieredKVPool

    return TieredKVPool


def get_paged_allocator_cls(result: Any, platform: Any) -> Any:
    """The allocator asks claims as well as pages."""
    if not runtime.active:
        return result
    from sglang_qevict.pool import TieredAllocator

    return TieredAllocator


def prefill_adder_init(result: None, adder: Any, *args: Any, **kwargs: Any) -> None:
    """Admission learns how far running requests may grow, which SGLang tells the adder alone.

    What waits is put in order then, if tenants take turns.
    """
    project_running(adder)
    if (turns := _turns()) is not None:
        turns.order(adder)


def prepare_for_extend(result: None, batch: Any) -> None:
    """Prompt lengths, which a chunk's own batch does not show; then room for what was admitted."""
    state = runtime.state
    if state is None:
        return
    for request in batch.reqs:
        row, prompt_tokens = request.kv.req_pool_idx, len(request.full_untruncated_fill_ids)
        terms = state.terms.of(request)
        shared: Sequence[int] = ()
        if row not in state.ledger:
            shared = batch.tree_cache.matched_pages(request)
            routing = terms.claims.prompt_routing(prompt_tokens)
            state.observer.admitted(row, routing, request.routing_key or DEFAULT_TENANT)
            if cut := batch.tree_cache.prefix_cut(request):
                state.observer.prefix_cut(*cut)
        state.extend_prepared(
            row,
            prompt_tokens,
            request.extend_end,
            shared=shared,
            publishes=not request.skip_radix_cache_insert,
            spilled=batch.tree_cache.spilled(request),
            terms=terms,
        )
    state.make_room(batch.tree_cache.evict_until)


def add_one_req(original: Any, adder: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Admission learns what the request that it is about to judge is held to and would share.

    One that waits for its own tenant, or for a chunk, does not keep others from being judged.
    """
    if runtime.state is not None:
        consider(adder, request, runtime.state.terms.of(request))
    result = original(adder, request, *args, **kwargs)
    budget, turns = adder.memory_budget, _turns()
    if turns is None or not isinstance(budget, FairPrefillBudget):
        return result
    from sglang.srt.managers.schedule_policy import AddReqResult

    # After the last one SGLang has to hear that its batch is full.
    if budget.passes_over() and not turns.is_last(request):
        return AddReqResult.CONTINUE
    return result


def get_new_batch_prefill(scheduler: Any, running_batch: Any) -> None:
    """Tenants that come while SGLang finds its batch full take their turns as well."""
    if (turns := _turns()) is not None:
        turns.begin(scheduler.waiting_queue, running_batch)


def chunk_limit(
    result: int | None, policy: Any, request: Any, waiting: Any, tokens: int, page_size: int
) -> int | None:
    """A long prompt in progress leaves a part of each pass to others."""
    if (turns := _turns()) is None:
        return result
    ours = turns.chunk_limit(request, waiting, tokens, page_size)
    return min((limit for limit in (result, ours) if limit is not None), default=None)


def retraction_order(result: list[int], requests: Any) -> list[int]:
    """Tenants that hold more than their share are retracted first."""
    turns = _turns()
    return result if turns is None else turns.keep_order(requests, result)


def _turns() -> Turns | None:
    return None if runtime.state is None else runtime.state.turns


def init_req_max_new_tokens(original: Any, scheduler: Any, request: Any) -> None:
    """A request comes in: what it can never have gets HTTP 400 with a sentence of ours.

    That is a budget beyond the limits, or a prompt that can never fit, whose bytes SGLang does not
    name. A request that leaves the length of its answer to the server gets as much as leaves it
    free to reuse its whole prompt. One that names a length keeps it, and reuses what that leaves
    room for.
    """
    state, params = runtime.state, request.sampling_params
    if state is None:
        original(scheduler, request)
        return
    try:
        state.coming_in = terms = state.terms.take_in(request)
    except ValueError as error:
        state.coming_in = state.terms.of(request)
        if request.to_finish is None:
            request.set_finish_with_abort(str(error))
        original(scheduler, request)
        return
    prompt_tokens = len(request.origin_input_ids)
    if params.max_new_tokens is None:
        params.max_new_tokens = state.most_beside_a_prefix(prompt_tokens, terms)
    original(scheduler, request)
    if request.to_finish is not None:
        for sentence in refused_prompt(state.ledger, prompt_tokens, terms):
            request.to_finish.message = sentence


def retract_decode(result: Any, batch: Any) -> Any:
    """Requests that go back to the queue are counted."""
    if runtime.state is not None:
        retracted, _, _ = result
        runtime.state.observer.retracted(len(retracted))
    return result


def flush_cache_after_weight_update(updater: Any, *args: Any, **kwargs: Any) -> None:
    """What other weights have made is not recalled, whether the cache is flushed or not."""
    if runtime.state is not None:
        runtime.state.spill.weights_changed()


def init_metrics_collector(result: None, scheduler: Any) -> None:
    """Tiering exports what SGLang exports labels for, before it builds its state."""
    if config_of(scheduler.server_args) is not None and scheduler.metrics_collector is not None:
        labels = scheduler.metrics_collector.labels
        runtime.metric_labels = {name: str(value) for name, value in labels.items()}


def create_tokenized_object(result: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedulers learn of a custom label that names the tenant: by the routing key, if it is free.

    The policy ``routing-key`` would schedule by it, so nothing is told then.
    """
    server_args = manager.server_args
    config = config_of(server_args)
    if (
        config is not None
        and (server_args.enable_metrics or config.tenants is not None)
        and server_args.schedule_policy != "routing-key"
    ):
        result.routing_key = tenant_of(
            result.routing_key,
            obj.custom_labels,
            server_args.tokenizer_metrics_allowed_custom_labels,
        )
    return result


def validate_beam_search(original: Any, coordinator: Any, req: Any, recv_req: Any) -> str | None:
    """Beam search gets HTTP 400 with our reason; SGLang's own asks for --page-size 1."""
    if runtime.active:
        for sentence in refused_request(req):
            return sentence
    return original(coordinator, req, recv_req)


def get_internal_state(original: Any, controller: Any, request: Any) -> Any:
    """``/server_info`` shows what tiering holds; the live page gets a look, and nothing else."""
    if runtime.state is None:
        return original(controller, request)
    if request.rid == LOOK:
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        look = look_at_scheduler(controller.scheduler, runtime.state)
        return GetInternalStateReqOutput(internal_state=look)
    result = original(controller, request)
    result.internal_state["kv_tiering"] = runtime.state.report()
    return result


def setup_http_server(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """The HTTP server gets the live page, in whichever process its app runs."""
    from sglang.srt.runtime_context import get_serving

    from sglang_qevict.live import worker

    if get_serving().tokenizer_worker_num > 1:
        os.environ.setdefault(APP_PATH_VARIABLE, worker.APP_PATH)


def add_api_key_middleware(result: None, app: Any, **keys: Any) -> None:
    """A browser that brings no key is asked for it by the live page."""
    from sglang_qevict.live.routes import AskForKey

    app.add_middleware(AskForKey)


def enable_fused_set_kv_buffer(original: Any, *args: Any, **kwargs: Any) -> bool:
    """Models leave it to the attention backend to store keys and values, as windows."""
    return not runtime.active and bool(original(*args, **kwargs))


_Hook = tuple[str, Any, HookType]
_SRT = "sglang.srt"

LAUNCHER_HOOKS: tuple[_Hook, ...] = (
    (
        f"{_SRT}.entrypoints.engine.Engine._launch_scheduler_processes",
        launch_scheduler_processes,
        HookType.AROUND,
    ),
)
"""Of a module that only launchers import: applied when a command line asks for tiering."""

HTTP_HOOKS: tuple[_Hook, ...] = (
    (
        f"{_SRT}.entrypoints.http_server._setup_and_run_http_server",
        setup_http_server,
        HookType.BEFORE,
    ),
    (f"{_SRT}.utils.auth.add_api_key_middleware", add_api_key_middleware, HookType.AFTER),
)
"""Of the HTTP server, with or without tiering: the live page tells that it is off, too."""

HOOKS: tuple[_Hook, ...] = (
    (f"{_SRT}.server_args.ServerArgs.add_cli_args", add_cli_args, HookType.AFTER),
    (f"{_SRT}.server_args.ServerArgs.from_cli_args", from_cli_args, HookType.AFTER),
    (
        f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        config_from_budget,
        HookType.AROUND,
    ),
    (
        f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
        resolve_max_num_reqs,
        HookType.AFTER,
    ),
    (f"{_SRT}.platforms.interface.SRTPlatform.get_kv_pool_cls", get_kv_pool_cls, HookType.AFTER),
    (
        f"{_SRT}.platforms.interface.SRTPlatform.get_paged_allocator_cls",
        get_paged_allocator_cls,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.schedule_policy.PrefillAdder.__init__",
        prefill_adder_init,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.schedule_policy.PrefillAdder.add_chunked_req",
        continue_prompt,
        HookType.BEFORE,
    ),
    (
        f"{_SRT}.managers.schedule_policy.PrefillAdder.add_one_req",
        add_one_req,
        HookType.AROUND,
    ),
    (
        f"{_SRT}.managers.schedule_policy.SchedulePolicy.shortest_prefill_chunk_limit",
        chunk_limit,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.scheduler.Scheduler.get_new_batch_prefill",
        get_new_batch_prefill,
        HookType.BEFORE,
    ),
    (
        f"{_SRT}.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        retraction_order,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        prepare_for_extend,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.retract_decode",
        retract_decode,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.scheduler_components.weight_updater"
        ".SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
        flush_cache_after_weight_update,
        HookType.BEFORE,
    ),
    (
        f"{_SRT}.managers.scheduler.Scheduler.init_metrics_collector",
        init_metrics_collector,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        create_tokenized_object,
        HookType.AFTER,
    ),
    (
        f"{_SRT}.managers.scheduler.Scheduler.init_req_max_new_tokens",
        init_req_max_new_tokens,
        HookType.AROUND,
    ),
    (
        f"{_SRT}.beam_search.coordinator.BeamCoordinator.validate_and_init",
        validate_beam_search,
        HookType.AROUND,
    ),
    (
        f"{_SRT}.models.utils.enable_fused_set_kv_buffer",
        enable_fused_set_kv_buffer,
        HookType.AROUND,
    ),
    (
        f"{_SRT}.managers.scheduler_components.internal_state"
        ".SchedulerInternalStateController.get_internal_state",
        get_internal_state,
        HookType.AROUND,
    ),
)


def register_hooks() -> None:
    """Register all hooks with SGLang, which applies them when all plugins are loaded."""
    _register(HOOKS)


def _register(hooks: tuple[_Hook, ...]) -> None:
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)


def _require_hooks_or_exit() -> None:
    try:
        require_hooks()
    except RuntimeError as error:
        arguments.exit_with(str(error))


def require_hooks() -> None:
    """Check that SGLang applied every hook in this process.

    Raises ``RuntimeError`` naming the missing ones: without them memory would not be
    accounted for, so a server must not start.
    """
    missing = [target for target, _, _ in HOOKS if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"KV tiering could not hook {', '.join(missing)}: this SGLang is not one that "
            "`sglang-qevict doctor` lists as tested"
        )
