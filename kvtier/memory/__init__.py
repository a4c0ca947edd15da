"""Host memory: the region of rows that processes share; limits and forks of this process."""

from kvtier.memory.region import LentRow as LentRow
from kvtier.memory.region import Region as Region
from kvtier.memory.region import give_advice as give_advice
from kvtier.memory.region import prefault as prefault
from kvtier.memory.rendezvous import Apart as Apart
from kvtier.memory.rendezvous import mappings as mappings
from kvtier.memory.rendezvous import ranges as ranges
from kvtier.memory.this_process import GROUP_SIGNALS as GROUP_SIGNALS
from kvtier.memory.this_process import PAGE_BYTES as PAGE_BYTES
from kvtier.memory.this_process import child_environment as child_environment
from kvtier.memory.this_process import file_bytes_max as file_bytes_max
from kvtier.memory.this_process import fill_standard_streams as fill_standard_streams
from kvtier.memory.this_process import is_of_a_limit as is_of_a_limit
from kvtier.memory.this_process import let_go_in_forks as let_go_in_forks
from kvtier.memory.this_process import reason as reason
from kvtier.memory.this_process import require_descriptors as require_descriptors
from kvtier.memory.this_process import require_file_bytes as require_file_bytes
from kvtier.memory.this_process import require_free as require_free
from kvtier.memory.this_process import start_thread as start_thread
