"""The JSON log format: one document per line."""

import json
import logging
from datetime import UTC, datetime

from dispatchers.cli.output import instant


class JsonLines(logging.Formatter):
    """`{"at": ..., "level": ..., "logger": ..., "message": ...}`, and `"trace"` for an exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": instant(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields)
