#!/usr/bin/env bash
# Write docs/settings.md from the settings themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
{
    echo "# Settings"
    echo
    echo "Written by \`scripts/settings_doc.sh\`. TOML file (\`--config\`) < environment < flags (\`max_loras\` → \`--max-loras\`)."
    for role in serve learner policy; do
        echo
        .venv/bin/qerld config "$role" --describe
    done
} >docs/settings.md
