#!/usr/bin/env python3
"""Asks a server the questions of dumped documents (needles.cjs --dump), a document's one after the other.

  python3 ask.py --url http://127.0.0.1:8000 FOLDER_OR_FILE... [--at-least TOKENS:RIGHT]...

Prints a line an answer and, at the end, a table of exact answers by length. Fails when a length has
fewer right than asked for. Needs nothing but Python.
"""
import argparse
import json
import pathlib
import sys
import time
import urllib.request


def chat(url, text):
    """Streamed: heartbeats keep the connection alive during a long prefill."""
    body = {'messages': [{'role': 'user', 'content': text}], 'temperature': 0, 'max_tokens': 40,
            'stream': True, 'stream_options': {'include_usage': True}}
    request = urllib.request.Request(url + '/v1/chat/completions', json.dumps(body).encode(),
                                     {'content-type': 'application/json'})
    content, tokens = '', 0
    with urllib.request.urlopen(request, timeout=3600) as response:
        for line in response:
            if not line.startswith(b'data: ') or line.strip() == b'data: [DONE]':
                continue
            event = json.loads(line[6:])
            if 'error' in event:
                raise RuntimeError(event['error'])
            for choice in event['choices']:
                content += choice['delta'].get('content') or ''
            if event.get('usage'):
                tokens = event['usage']['prompt_tokens']
    return content.strip(), tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('paths', nargs='+', type=pathlib.Path)
    parser.add_argument('--url', required=True)
    parser.add_argument('--at-least', action='append', default=[], metavar='TOKENS:RIGHT')
    arguments = parser.parse_args()
    files = [f for p in arguments.paths for f in (sorted(p.rglob('*.json')) if p.is_dir() else [p])]
    documents = [(json.loads(f.read_text(encoding='utf8')), f) for f in files]
    right, asked, seconds = {}, {}, {}
    for document, file in sorted(documents, key=lambda d: d[0]['tokens']):
        length = document['tokens']
        for i, fact in enumerate(document['facts']):
            began = time.monotonic()
            answer, tokens = chat(arguments.url, document['text'] + '\n\n' + fact['question'])
            took = time.monotonic() - began
            ok = answer == fact['answer']
            right[length] = right.get(length, 0) + ok
            asked[length] = asked.get(length, 0) + 1
            seconds[length] = seconds.get(length, 0) + took
            print(f'{"right" if ok else "WRONG"}  {file.name}  fact {i + 1}  {tokens} tokens  {took:.1f} s  '
                  + (answer if ok else f'want: {fact["answer"]}  got: {answer}'), flush=True)
    print('tokens  right/asked  seconds')
    for length in sorted(asked):
        print(f'{length:7}  {right[length]}/{asked[length]}  {seconds[length]:.1f}')
    failed = False
    for limit in arguments.at_least:
        length, least = map(int, limit.split(':'))
        if right.get(length, 0) < least:
            print(f'fewer than {least} right at {length} tokens')
            failed = True
    sys.exit(failed)


if __name__ == '__main__':
    main()
