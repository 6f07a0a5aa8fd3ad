"""`onward completion`: a script that completes commands, options and fields in bash, zsh or fish."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from onward.report.phases import Phases

DESCRIPTION = (
    'Prints a completion script. bash: eval "$(onward completion bash)" in ~/.bashrc; zsh: the same with zsh in '
    "~/.zshrc, after compinit; fish: onward completion fish > ~/.config/fish/completions/onward.fish."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints the script."""
    from onward.commands.table import words_of_commands

    print(script(options.shell, words_of_commands()))


def script(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """The script of a shell.

    Args:
        shell: `bash`, `zsh` or `fish`.
        words: command -> its options, and the fields that it takes.
    """
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words)


def _bash(words: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f'    {command}) words="{" ".join(options)}" ;;' for command, options in words.items())
    return f"""_onward() {{
  local words="{" ".join(words)}" word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
    esac
    case "$word" in -*) ;; *) [ "${{COMP_WORDS[1]}}" = help ] || words="" ;; esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _onward onward"""


def _zsh(words: Mapping[str, Sequence[str]]) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(words)}"


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c onward -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    for command, options in words.items():
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        longs = [option for option in options if option.startswith("--")]
        lines += [f"complete -c onward {seen} -l '{option[2:]}'" for option in longs]
        plain = [option for option in options if not option.startswith("-")]
        lines += [f"complete -c onward {seen} -f -a '{' '.join(plain)}'"] if plain else []
    return "\n".join(lines)
