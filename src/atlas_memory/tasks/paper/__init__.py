"""The ATLAS paper's evaluation: language modelling and common sense, and recall from a document.

`groups` says what belongs to it, `loading` where the rows come from, `run` scores a model, `report` keeps the result.
The harness itself (`pip install 'atlas-memory[eval]'`) is imported when an evaluation starts, not before.
"""

from atlas_memory.tasks.paper.groups import ALL, GROUPS, EvaluationError, PaperTask, paper_tasks
from atlas_memory.tasks.paper.report import Report, Score
from atlas_memory.tasks.paper.run import Request, evaluate

__all__ = [
    "ALL",
    "GROUPS",
    "EvaluationError",
    "PaperTask",
    "Report",
    "Request",
    "Score",
    "evaluate",
    "paper_tasks",
]
