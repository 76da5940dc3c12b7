"""The log for programs: one JSON document a line."""

import json
import logging
from datetime import UTC, datetime

from dispatchers.cli.output import instant


class JsonLines(logging.Formatter):
    """`{"at": ..., "level": ..., "logger": ..., "message": ...}`, and `"trace"` where an exception is told of."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "at": instant(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told)
