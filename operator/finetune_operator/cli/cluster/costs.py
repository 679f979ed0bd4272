"""`finetune cost`: resources that jobs have used and are expected to use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune_operator.cli.cluster.cluster_jobs import ClusterJob
from finetune_operator.cli.cluster.jobview import phase_of
from finetune_operator.cli.terminal.console import print_trimmed
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.types import CostStatus, EstimateStatus


@dataclass(frozen=True)
class Bill:
    """Costs of one job, from its status."""

    job: ClusterJob

    @property
    def cost(self) -> CostStatus:
        """Cost so far; empty before the first pod has run."""
        return self.job.status.cost or CostStatus()

    @property
    def estimated(self) -> EstimateStatus:
        """Estimate of the training by the plan."""
        plan = self.job.status.plan
        return EstimateStatus() if plan is None else plan.estimated

    def data(self) -> dict[str, Any]:
        """Return the data for `-o json`; amounts are null if no price is known."""
        cost, estimated = self.cost, self.estimated
        return {
            "name": self.job.name,
            "namespace": self.job.metadata.namespace,
            "phase": phase_of(self.job),
            "nodeSeconds": cost.node_seconds,
            "billableSeconds": cost.billable_seconds,
            "currency": cost.currency or estimated.currency,
            "amount": cost.amount,
            "saved": cost.saved,
            "estimated": {"seconds": estimated.duration_seconds, "amount": estimated.cost},
        }


def totals(bills: Sequence[Bill]) -> list[dict[str, Any]]:
    """Return the sums by currency: amounts of different ones are never added. The last is of jobs without a price."""
    groups: dict[str | None, list[Bill]] = defaultdict(list)
    for bill in bills:
        groups[bill.cost.currency].append(bill)
    return [
        {
            "currency": currency,
            "jobs": len(group),
            "nodeSeconds": sum(one.cost.node_seconds for one in group),
            "billableSeconds": sum(one.cost.billable_seconds for one in group),
            "amount": None if currency is None else sum(one.cost.amount or 0.0 for one in group),
            "saved": None if currency is None else sum(one.cost.saved or 0.0 for one in group),
        }
        for currency, group in sorted(groups.items(), key=lambda pair: (pair[0] is None, pair[0] or ""))
    ]


def print_costs(console: Console, bills: Sequence[Bill], with_namespace: bool) -> None:
    """Print a row per job, and the sums below if there are several."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    columns = ["NAME", "PHASE", "NODE TIME", "PAID TIME", "COST", "SAVED", "TRAINING EXPECTED"]
    for column in ["NAMESPACE", *columns] if with_namespace else columns:
        table.add_column(column, no_wrap=True)
    for bill in bills:
        cost, estimated, currency = bill.cost, bill.estimated, bill.cost.currency
        expected = [] if estimated.duration_seconds is None else [human_seconds(estimated.duration_seconds)]
        expected += [] if estimated.cost is None else [money(estimated.cost, estimated.currency)]
        row = [
            bill.job.name,
            phase_of(bill.job),
            human_seconds(cost.node_seconds),
            human_seconds(cost.billable_seconds),
            money(cost.amount, currency),
            money(cost.saved, currency),
            ", ".join(expected) or "-",
        ]
        table.add_row(*([bill.job.metadata.namespace, *row] if with_namespace else row))
    if len(bills) > 1:
        for total in totals(bills):
            row = [
                "total",
                f"{total['jobs']} jobs" if total["jobs"] != 1 else "1 job",
                human_seconds(total["nodeSeconds"]),
                human_seconds(total["billableSeconds"]),
                money(total["amount"], total["currency"]),
                money(total["saved"], total["currency"]),
                "",
            ]
            table.add_row(*(["", *row] if with_namespace else row), style="bold")
    print_trimmed(console, table)


def money(amount: float | None, currency: str | None) -> str:
    """Return `12.30 EUR`; a dash if no price is known."""
    return "-" if amount is None else f"{amount:,.2f} {currency or ''}".rstrip()
