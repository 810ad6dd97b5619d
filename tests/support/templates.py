"""Chat templates that try to reach the process, to be formatted with `executed`, a path that they would make."""

from __future__ import annotations

ESCAPES = [
    "{{{{ messages.__class__.__mro__[1].__subclasses__()[0]('{executed}') }}}}",
    "{{{{ cycler.__init__.__globals__.os.mkdir('{executed}') }}}}",
    "{{{{ lipsum.__globals__['os'].mkdir('{executed}') }}}}",
    "{{{{ raise_exception.__globals__['__builtins__']['__import__']('os').mkdir('{executed}') }}}}",
    "{{{{ self._TemplateReference__context.environment.from_string('x').module.__loader__ }}}}",
    "{{{{ ''|attr('__class__') }}}}{{{{ (''|attr('__class__')).mro() }}}}",
    "{{{{ '{{0.__class__.__mro__}}'.format(messages) }}}}{{{{ messages.append(1) }}}}",
    "{{% set x = messages.append({{}}) %}}",
    "{{{{ strftime_now.__globals__.__builtins__.open('{executed}', 'w') }}}}",
]
