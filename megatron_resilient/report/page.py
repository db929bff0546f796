"""The page: its sections, and the template that they go into."""

from importlib.resources import files

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatron_resilient import __version__
from megatron_resilient.report import header, tables
from megatron_resilient.report.content import Section
from megatron_resilient.report.loads import ExpertLoads, mean_of_known
from megatron_resilient.report.members import Membership
from megatron_resilient.report.placement import last_placement
from megatron_resilient.report.plot_events import (
    plot_checkpoints,
    plot_recoveries,
    plot_timeline,
    slowest_recoveries,
    timeline_events,
)
from megatron_resilient.report.plot_load import (
    chosen_layers,
    plot_experts,
    plot_imbalance,
    plot_layers,
)
from megatron_resilient.report.plot_members import plot_members
from megatron_resilient.report.plot_placement import plot_placement
from megatron_resilient.report.plot_schedule import plot_schedule
from megatron_resilient.report.plot_training import plot_loss, plot_throughput
from megatron_resilient.report.run import Run
from megatron_resilient.report.schedules import Schedules
from megatron_resilient.report.svg import STYLE, to_svg
from megatron_resilient.report.text import (
    clean,
    compact,
    duration,
    percent,
    plural,
    significant,
    times,
)


def build_page(run: Run) -> str:
    """Returns the report of a run as one HTML page that loads nothing from elsewhere.

    Raises:
        TelemetryError: The events contradict each other.
    """
    sections, missing = [], []
    with matplotlib.rc_context(STYLE):
        for build in (
            _loss,
            _throughput,
            _expert_load,
            _placement,
            _schedule,
            _members,
            _recoveries,
            _checkpoints,
            _errors,
            _timeline,
        ):
            section = build(run)
            if isinstance(section, Section):
                sections.append(section)
            else:
                missing.append(section)
    here = files(__package__)
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else clean(str(value)),
    )
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        name=run.name,
        css=Markup(here.joinpath("page.css").read_text(encoding="utf-8")),
        period=header.period(run),
        exit=header.how_it_ended(run),
        tiles=header.tiles(run),
        facts=header.facts(run),
        sections=sections,
        missing=missing,
        version=__version__,
        count=plural(len(run.events), "event"),
    )


def _loss(run: Run) -> Section | str:
    losses = run.summary.losses
    if not losses:
        return "Loss: no finished step names one."
    first, last = min(losses), max(losses)
    lead = f"{significant(losses[last], 4)} at step {last:,}"
    lead += f", from {significant(losses[first], 4)} at step {first:,}." if first < last else "."
    if run.lost:
        lead += (
            f" {plural(run.summary.lost_steps, 'step')} ({compact(run.summary.lost_tokens)} tokens)"
            " were rolled back after a restart from an older checkpoint; they are drawn in grey."
        )
    label = f"Loss over training steps. {lead}"
    return Section("loss", "Loss", lead, [to_svg(plot_loss(run), "loss", label)])


def _throughput(run: Run) -> Section | str:
    median = run.summary.tokens_per_second
    if median is None:
        return "Throughput: no step took measurable time."
    rates = run.done.tokens_per_second[np.isfinite(run.done.tokens_per_second)]
    lead = f"Median {compact(median)} tokens per second past the first steps of each job"
    if rates.size:
        low, high = map(compact, np.quantile(rates, [0.05, 0.95]))
        if low != high:
            lead += f"; 90 % of the steps ran at {low} to {high}"
    lead += "."
    label = f"Tokens per second over running time. {lead}"
    return Section("throughput", "Throughput", lead, [to_svg(plot_throughput(run), "rate", label)])


def _expert_load(run: Run) -> Section | str:
    loads = ExpertLoads.of(run.events)
    if loads is None:
        return "Expert load: no expert_load events."
    if not np.isfinite(loads.imbalance).any():
        return "Expert load: no expert had a token."
    typical = loads.typical_imbalance()
    worst = int(np.nanargmax(typical))
    lead = (
        f"Over training, the busiest expert of a layer had {times(float(np.nanmean(typical)))} the "
        f"mean load; layer {loads.layers[worst]} was the most uneven with "
        f"{times(float(typical[worst]))}."
    )
    if loads.rank_imbalance is not None:
        ranks = mean_of_known(loads.rank_imbalance.ravel(), axis=0)
        lead += f" With their replicas, the busiest rank computed {times(float(ranks))} the mean."
    pictures = [
        to_svg(plot_imbalance(run, loads), "imbalance", f"Greatest over mean load by step. {lead}")
    ]
    if len(loads.layers) > 1:
        label = f"Heat map of greatest over mean load of {len(loads.layers)} layers by step. {lead}"
        pictures.append(to_svg(plot_layers(loads), "layers", label))
    shown = len(chosen_layers(loads))
    if shown < len(loads.layers):
        lead += (
            f" Below, experts of {shown} of the {len(loads.layers)} layers, the most uneven one "
            "among them."
        )
    label = f"Heat maps of the load of each expert by step, {plural(shown, 'layer')}."
    pictures.append(to_svg(plot_experts(loads), "experts", label))
    return Section("expert-load", "Expert load", lead, pictures)


def _placement(run: Run) -> Section | str:
    placement = last_placement(run.events)
    if not placement:
        return "Placement: no replicas of experts."
    counts = [count for layer in placement.values() for count in layer.replicas.values()]
    moves = len(run.of_kind("rebalance"))
    low, high = min(counts), max(counts)
    few = plural(high, "replica") if low == high else f"{low} to {high} replicas"
    lead = f"Every expert has {few}; they were placed anew {plural(moves, 'time')}."
    label = f"Experts in the slots of each rank, at the end. {lead}"
    picture = to_svg(plot_placement(placement), "placement", label)
    found = [tables.placement_table(placement)]
    if moves:
        found.append(tables.rebalances_table(run))
    return Section("placement", "Placement of experts", lead, [picture], found)


def _schedule(run: Run) -> Section | str:
    schedules = Schedules.of(run.events)
    if schedules is None:
        return "Schedule: communication and experts were not co-scheduled."
    lead = f"{plural(len(schedules.layers), 'layer')} cut into chunks"
    pairs = [
        (event["measured_seconds"], event["planned_seconds"])
        for event in schedules.passes.values()
        if event.get("measured_seconds") and event["planned_seconds"]
    ]
    if pairs:
        errors = [abs(planned / measured - 1) for measured, planned in pairs]
        lead += f"; plans missed the measured times by {percent(float(np.median(errors)))} (median)"
    lead += "."
    pictures = []
    for number, (phase, event) in enumerate(schedules.drawn.items()):
        label = f"Operations of layer {event['layer']}, {phase}, by stream and time. {lead}"
        pictures.append(to_svg(plot_schedule(event), f"schedule-{number}", label))
    return Section("schedule", "Schedule of communication and experts", lead, pictures)


def _members(run: Run) -> Section | str:
    membership = Membership.of(run.events)
    if membership is None:
        return "Members: no member_join or member_leave events, and no change of ranks."
    sizes = [count for _, count in membership.counts]
    failed = sum(stay.how == "failed" for stay in membership.stays)
    planned = sum(stay.how == "planned" for stay in membership.stays)
    lead = f"Up to {max(sizes):,} {membership.unit}, {sizes[-1]:,} at the end"
    if membership.stays:
        lead += f"; {failed:,} failed, {planned:,} left as planned"
    else:
        lead += f"; {plural(run.summary.failures, 'failure')}"
    lead += "."
    label = f"Members over running time. {lead}"
    return Section(
        "members", "Members", lead, [to_svg(plot_members(run, membership), "members", label)]
    )


def _recoveries(run: Run) -> Section | str:
    recoveries = run.summary.recoveries
    if not recoveries:
        return "Recoveries: no recovery events."
    totals = np.array([recovery["total_seconds"] for recovery in recoveries])
    lead = (
        f"{plural(len(recoveries), 'recovery', 'recoveries')}, "
        f"median {duration(float(np.median(totals)))}, slowest {duration(float(totals.max()))}."
    )
    drawn = len(slowest_recoveries(run))
    if drawn < len(recoveries):
        lead += f" The {drawn} slowest are drawn."
    picture = to_svg(plot_recoveries(run), "recoveries", f"Phases of the recoveries. {lead}")
    return Section("recoveries", "Recoveries", lead, [picture], [tables.recoveries_table(run)])


def _checkpoints(run: Run) -> Section | str:
    saves = run.summary.checkpoints
    if not saves:
        return "Checkpoints: no checkpoint_saved events."
    stalls = [save["stall_seconds"] for save in saves]
    lead = (
        f"{plural(len(saves), 'save')}; training waited {duration(sum(stalls))} for them, "
        f"{duration(max(stalls))} for the longest."
    )
    pictures = []
    if any(save["step"] is not None for save in saves):
        label = f"Stall and duration of each save by step. {lead}"
        pictures.append(to_svg(plot_checkpoints(run), "checkpoints", label))
    return Section("checkpoints", "Checkpoints", lead, pictures, [tables.checkpoints_table(run)])


def _errors(run: Run) -> Section | str:
    if not run.summary.errors:
        return "Errors: none."
    return Section("errors", "Errors", tables=[tables.errors_table(run)])


def _timeline(run: Run) -> Section | str:
    if not timeline_events(run):
        return "Timeline: nothing but steps."
    picture = to_svg(
        plot_timeline(run), "timeline", "Events over running time, one row for each kind."
    )
    found = [tables.events_table(run)]
    if run.summary.segments:
        found.insert(0, tables.jobs_table(run))
    return Section("timeline", "Timeline", "", [picture], found)
